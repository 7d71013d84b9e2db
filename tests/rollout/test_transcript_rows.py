"""Laws of cutting a session into rows."""

import pytest
from gateway_harness import generated_edges
from hypothesis import given, settings
from hypothesis import strategies as st

from tree_rl.rollout.transcript import ModelCall, Row, rows_of_calls


def call(prompt: list[int], response: list[int]) -> ModelCall:
    log_probs = tuple(-0.01 * (len(prompt) + i) - token for i, token in enumerate(response))
    return ModelCall(prompt_ids=tuple(prompt), response_ids=tuple(response), log_probs=log_probs)


def test_a_conversation_that_only_grows_is_one_row() -> None:
    first = call([1, 2], [3, 4])
    second = call([1, 2, 3, 4, 9, 9], [5])
    third = call([1, 2, 3, 4, 9, 9, 5, 8], [6, 7])
    (row,) = rows_of_calls([first, second, third])
    assert row.prompt_ids == (1, 2)
    assert row.response_ids == (3, 4, 9, 9, 5, 8, 6, 7)
    assert row.response_mask == (1, 1, 0, 0, 1, 0, 1, 1)
    recorded = [*first.log_probs, 0.0, 0.0, *second.log_probs, 0.0, *third.log_probs]
    assert list(row.response_log_probs) == recorded


def test_stripped_reasoning_opens_a_row_whose_history_is_context() -> None:
    rows = rows_of_calls([call([1], [70, 71, 3]), call([1, 3, 9], [70, 4]), call([1, 3, 9, 4, 9], [5])])
    assert [row.response_ids for row in rows] == [(70, 71, 3), (3, 9, 70, 4), (3, 9, 4, 9, 5)]
    assert [row.response_mask for row in rows] == [(1, 1, 1), (0, 0, 1, 1), (0, 0, 0, 0, 1)]
    assert all(row.prompt_ids == (1,) for row in rows)


def test_parallel_branches_share_the_generated_turn_above_them() -> None:
    calls = [call([1], [2, 3]), call([1, 2, 3, 10], [4]), call([1, 2, 3, 20], [5]), call([1, 2, 3, 4, 5], [6])]
    rows = rows_of_calls(calls)
    assert [row.token_ids for row in rows] == [(1, 2, 3, 10, 4), (1, 2, 3, 20, 5), (1, 2, 3, 4, 5, 6)]
    assert [row.response_mask for row in rows] == [(1, 1, 0, 1), (1, 1, 0, 1), (1, 1, 0, 0, 1)]


def test_a_branch_that_does_not_start_with_the_first_prompt_keeps_its_own() -> None:
    rows = rows_of_calls([call([1, 2], [3]), call([1, 7, 7], [4])])
    assert (rows[1].prompt_ids, rows[1].response_ids) == ((1, 7, 7), (4,))


def test_rows_that_train_nothing_are_left_out() -> None:
    rows = rows_of_calls([call([1], [2]), call([1, 5], [])])
    assert [row.token_ids for row in rows] == [(1, 2)]
    (only,) = rows_of_calls([call([1, 5], [])])
    assert only.response_mask == ()


def test_without_log_probs_the_rows_have_none() -> None:
    calls = [ModelCall(prompt_ids=(1,), response_ids=(2,), log_probs=None), call([1, 3], [4])]
    assert [row.response_log_probs for row in rows_of_calls(calls)] == [None, None]


def test_a_call_that_contradicts_itself_is_refused() -> None:
    with pytest.raises(ValueError, match="2 generated tokens with 1 log-probs"):
        ModelCall(prompt_ids=(1,), response_ids=(2, 3), log_probs=(0.0,))
    with pytest.raises(ValueError, match="empty prompt"):
        ModelCall(prompt_ids=(), response_ids=(2,), log_probs=None)


@st.composite
def sessions(draw: st.DrawFn) -> list[ModelCall]:
    """Calls that continue, re-render or branch off earlier ones, over three tokens so that prefixes collide."""
    tokens = st.lists(st.integers(0, 2), max_size=4)
    calls = [call([0, *draw(tokens)], draw(tokens))]
    for _ in range(draw(st.integers(0, 5))):
        earlier = draw(st.sampled_from(calls))
        context = list(earlier.prompt_ids + earlier.response_ids)
        cut = draw(st.integers(1, len(context)))
        calls.append(call(context[:cut] + draw(tokens), draw(tokens)))
    return calls


def row_edges(row: Row) -> list[tuple[tuple[int, ...], int, int, float]]:
    start, tokens = len(row.prompt_ids), row.token_ids
    return [
        (tokens[: start + i], tokens[start + i], mask, row.response_log_probs[i])
        for i, mask in enumerate(row.response_mask)
    ]


@settings(max_examples=60, deadline=None)
@given(sessions())
def test_a_token_is_trained_exactly_where_it_was_generated_in_that_context(calls: list[ModelCall]) -> None:
    edges = generated_edges(calls)
    trained = set()
    for row in rows_of_calls(calls):
        assert len(row.response_ids) == len(row.response_log_probs) == len(row.response_calls)
        for context, token, mask, log_prob in row_edges(row):
            assert mask == ((context, token) in edges)
            assert log_prob == (edges[context, token] if mask else 0.0)
            if mask:
                trained.add((context, token))
        for offset, index in enumerate(row.response_calls):
            if index < 0:
                assert row.response_mask[offset] == 0
                continue
            source, position = calls[index], len(row.prompt_ids) + offset
            assert position >= len(source.prompt_ids)
            assert (source.prompt_ids + source.response_ids)[: position + 1] == row.token_ids[: position + 1]
    assert trained == edges.keys()
