"""Laws of cutting a session into rows."""

from dataclasses import replace

import pytest
from gateway_harness import generated_edges, trained_edges
from hypothesis import given, settings
from hypothesis import strategies as st

from tree_rl.rollout.transcript import ModelCall, rows_of_calls


def call(prompt: list[int], response: list[int]) -> ModelCall:
    log_probs = tuple(-0.01 * (len(prompt) + i) - token for i, token in enumerate(response))
    return ModelCall(prompt_ids=tuple(prompt), response_ids=tuple(response), log_probs=log_probs)


WORK, SUMMARY = call([1, 2], [3, 4]), call([1, 2, 3, 4, 5], [6, 7])
SIDE = replace(SUMMARY, side="summary", weight=0.0)
HISTORIES: dict[str, tuple[list[ModelCall], list[tuple[list[int], list[int]]]]] = {
    "a conversation that only grows is one row": (
        [WORK, call([1, 2, 3, 4, 9, 9], [5]), call([1, 2, 3, 4, 9, 9, 5, 8], [6, 7])],
        [([1, 2], [3, 4, 9, 9, 5, 8, 6, 7])],
    ),
    "stripped reasoning opens a row whose history is context": (
        [call([1], [70, 71, 3]), call([1, 3, 9], [70, 4]), call([1, 3, 9, 4, 9], [5])],
        [([1], [70, 71, 3]), ([1], [3, 9, 70, 4]), ([1], [3, 9, 4, 9, 5])],
    ),
    "parallel branches share the generated turn above them": (
        [call([1], [2, 3]), call([1, 2, 3, 10], [4]), call([1, 2, 3, 20], [5]), call([1, 2, 3, 4, 5], [6])],
        [([1], [2, 3, 10, 4]), ([1], [2, 3, 20, 5]), ([1], [2, 3, 4, 5, 6])],
    ),
    "a branch that does not start with the first prompt keeps its own": (
        [call([1, 2], [3]), call([1, 7, 7], [4])],
        [([1, 2], [3]), ([1, 7, 7], [4])],
    ),
    "rows that train nothing are left out": ([call([1], [2]), call([1, 5], [])], [([1], [2])]),
    "but for the only one": ([call([1, 5], [])], [([1, 5], [])]),
    "a summary of weight zero ends no row": ([WORK, SIDE], [([1, 2], [3, 4])]),
    "nor does work beside it": ([WORK, SIDE, call([1, 2, 3, 4, 8], [9])], [([1, 2], [3, 4, 8, 9])]),
    "nor work after it": ([WORK, SIDE, call([1, 2, 3, 4, 5, 6, 7, 8], [9])], [([1, 2], [3, 4, 5, 6, 7, 8, 9])]),
}


@pytest.mark.parametrize("law", HISTORIES)
def test_rows_by_hand(law: str) -> None:
    calls, expected = HISTORIES[law]
    assert [(list(row.prompt_ids), list(row.response_ids)) for row in rows_of_calls(calls)] == expected


def test_a_side_call_with_a_weight_shares_the_row_that_it_continues() -> None:
    for weight, weights in ((1.0, None), (0.25, (1.0, 1.0, 0.0, 0.25, 0.25))):
        (row,) = rows_of_calls([WORK, replace(SUMMARY, side="summary", weight=weight)])
        assert (row.response_mask, row.response_weights) == ((1, 1, 0, 1, 1), weights)
        assert row.response_log_probs == (*WORK.log_probs, 0.0, *SUMMARY.log_probs)


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
    """Calls that continue, re-render or branch off earlier ones, over three tokens so that prefixes collide.

    Some are side calls of weight zero, which train nothing.
    """
    tokens = st.lists(st.integers(0, 2), max_size=4)
    calls = [call([0, *draw(tokens)], draw(tokens))]
    for _ in range(draw(st.integers(0, 5))):
        earlier = draw(st.sampled_from(calls))
        context = list(earlier.prompt_ids + earlier.response_ids)
        cut = draw(st.integers(1, len(context)))
        made = call(context[:cut] + draw(tokens), draw(tokens))
        calls.append(replace(made, weight=draw(st.sampled_from([1.0, 1.0, 0.0]))))
    return calls


@settings(max_examples=60, deadline=None)
@given(sessions())
def test_a_token_is_trained_exactly_where_it_was_generated_in_that_context(calls: list[ModelCall]) -> None:
    edges = generated_edges([one for one in calls if one.weight])
    rows = rows_of_calls(calls)
    assert trained_edges(rows) == edges
    for row in rows:
        tokens, start = row.token_ids, len(row.prompt_ids)
        assert len(row.response_ids) == len(row.response_log_probs) and row.response_weights is None
        for offset, (index, mask) in enumerate(zip(row.response_calls, row.response_mask, strict=True)):
            position = start + offset
            assert mask == ((tokens[:position], tokens[position]) in edges)
            assert mask or row.response_log_probs[offset] == 0
            assert mask == 0 or index >= 0
            if index >= 0:
                source = calls[index]
                assert position >= len(source.prompt_ids)
                assert (source.prompt_ids + source.response_ids)[: position + 1] == tokens[: position + 1]
