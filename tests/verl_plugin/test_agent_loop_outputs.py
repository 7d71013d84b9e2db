"""What verl receives of a session, and how the agent's options are read."""

import json
from pathlib import Path

import pytest

from tree_rl.rollout.environment import Outcome, ShellEnvironment
from tree_rl.rollout.session import SessionRecord
from tree_rl.rollout.transcript import ModelCall
from tree_rl.verl_plugin.agent_loop import _RecordingModel, read_agent_options, to_outputs
from tree_rl.verl_plugin.tree_dump import FinishedRow, append_tree

OUTCOME = Outcome(answer="a", turns=2, malformed_calls=1, is_complete=True)


def call(prompt: tuple[int, ...], response: tuple[int, ...]) -> ModelCall:
    return ModelCall(prompt_ids=prompt, response_ids=response, log_probs=(-1.0,) * len(response))


def outputs_of(*calls: ModelCall) -> list:
    record = SessionRecord(calls=calls, reward=0.5, outcome=OUTCOME, tool_calls=3)
    model = _RecordingModel(None, {})
    model.versions += [4, 5, 4]
    return to_outputs(record, model, seconds=2.0)


def test_every_branch_carries_the_sessions_reward_and_the_same_fields() -> None:
    outputs = outputs_of(call((1,), (2, 3)), call((1, 9), (4,)))
    assert [(o.prompt_ids, o.response_ids, o.response_mask) for o in outputs] == [
        ([1], [2, 3], [1, 1]),
        ([1], [9, 4], [0, 1]),
    ]
    assert [o.reward_score for o in outputs] == [0.5, 0.5]
    assert outputs[0].extra_fields == outputs[1].extra_fields
    assert outputs[0].extra_fields["min_global_steps"] == 4 and outputs[0].extra_fields["max_global_steps"] == 5
    assert outputs[0].extra_fields["reward_extra_info"]["branches"] == 2
    stored = outputs[1].as_dict()
    assert stored["rollout_log_probs"].tolist() == [0.0, -1.0] and stored["rm_scores"].tolist() == [0.0, 0.5]


def test_a_session_that_generated_nothing_fails() -> None:
    with pytest.raises(ValueError, match="without a generated token"):
        outputs_of(call((1,), ()))


def test_options_of_the_config_and_of_the_sample_are_read() -> None:
    environment, options = read_agent_options(
        {"max_turns": 3, "parallel_tools": "branches", "strip_reasoning": None},
        max_prompt_tokens=10,
        max_response_tokens=20,
    )
    assert environment is ShellEnvironment
    assert (options.max_turns, options.parallel_tools, options.strip_reasoning) == (3, "branches", True)
    assert (options.max_prompt_tokens, options.max_response_tokens, options.max_turn_tokens) == (10, 20, 20)


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"turns": 3}, r"rollout\.custom\.tree_agent\.turns: no such option"),
        ({"environment": "Nowhere"}, "expected a class as package.module.Class"),
        ({"max_turns": 0}, "max_turns=0"),
    ],
)
def test_bad_options_are_refused_by_key(given: dict, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        read_agent_options(given, max_prompt_tokens=10, max_response_tokens=20)


def test_dumped_rows_are_read_by_inspect(tmp_path: Path) -> None:
    from tree_rl.inspection.row_file import read_row_file

    rows = [
        FinishedRow(
            uid="u", session=session, index=0, step=7, reward=1.0,
            prompt_ids=(1, 2), response_ids=(3, session), response_mask=(1, 0),
        )
        for session in (4, 5)
    ]  # fmt: skip
    path = append_tree(tmp_path / "trees", "train", rows)
    assert path.name.startswith("train-step000007-")
    assert [json.loads(line)["session"] for line in path.read_text().splitlines()] == [4, 5]
    read = read_row_file(path)
    assert [row.token_ids.tolist() for row in read] == [[1, 2, 3, 4], [1, 2, 3, 5]]
    assert {row.group for row in read} == {"u"} and rows[0].key == "u_4_0"
