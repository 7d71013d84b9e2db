"""Branches start from recorded tokens and an equal environment, by copy or by replay; all is real but the model."""

import random
from collections.abc import Mapping, Sequence
from typing import Any

import pytest
from drawn_sessions import DrawingModel, build_tasks, forked, play, serving
from sandboxes_here import HERE, needs_bubblewrap
from transformers import PreTrainedTokenizerFast

from tree_rl.rollout.agents.react import ReActAgent, ReActOptions
from tree_rl.rollout.branching.grow import BranchOptions, grow
from tree_rl.rollout.branching.recording import Fork, NotForked, Recording
from tree_rl.rollout.environments.swe import SweEnvironment
from tree_rl.rollout.sandbox.sandbox import SandboxOptions
from tree_rl.rollout.transcript import rows_of_calls
from tree_rl.tree import Forest


def here() -> SweEnvironment:
    """Copies its files where bubblewrap works."""
    return SweEnvironment(HERE)


class Replayed(SweEnvironment):
    """Has a `call` of its own, so its files say not all."""

    async def call(self, call: Any) -> str:
        return await super().call(call)


class Dated(ReActAgent):
    """Writes something else into each session's first message."""

    async def run(self, messages: Sequence[Mapping[str, Any]], **others: Any) -> Any:
        text = f"{messages[-1]['content']} {random.SystemRandom().random()}"
        return await super().run([*messages[:-1], {**messages[-1], "content": text}], **others)


@pytest.mark.parametrize("environment", [SweEnvironment, Replayed])
async def test_branches_have_their_parents_tokens_before_the_cut_and_their_own_behind_it(
    chatml: PreTrainedTokenizerFast, environment: type[SweEnvironment]
) -> None:
    model, first, branches = DrawingModel(chatml, build_tasks(), max_turns=4), Recording(number=0), list[Recording]()
    options = BranchOptions(policy="fixed", options={"every_tokens": 80, "depth": 3}, rounds=2)
    async with serving(model) as gateway:

        async def run(one: Recording) -> None:
            await play(gateway, one, model.tasks[1], seed=4000 + one.number, environment=lambda: environment(HERE))

        await run(first)
        rng = random.Random(4)
        await grow([first], run, options, branches=branches, number=1, rng=rng, vocabulary=len(chatml))
    for one in branches:
        assert one.fault is None and one.fork is not None and one.generated_tokens > 0
        left = one.fork.token
        for call, before in zip(one.calls, one.fork.parent.calls, strict=False):
            kept = min(left, len(before.response_ids))
            assert call.prompt_ids == before.prompt_ids
            assert call.log_probs is not None and before.log_probs is not None
            assert (call.response_ids[:kept], call.log_probs[:kept]) == (
                before.response_ids[:kept],
                before.log_probs[:kept],
            )
            left -= kept
            if len(call.response_ids) > kept or not left:
                break
        assert left == 0
    sessions = [first, *branches]
    assert sum(one.generated_tokens for one in sessions) == model.generated, "recorded tokens are not sampled again"
    rows = [row.token_ids for one in sessions for row in rows_of_calls(one.calls)]
    assert Forest.from_rows(rows).num_unique < sum(map(len, rows)), "the trie merges what they share"
    before = sum(len(one.fork.tool_calls) for one in branches if one.fork is not None)
    repeated = before if environment is Replayed or HERE.unconfined else 0
    assert sum(one.replayed_calls for one in branches) == repeated and before > 0
    assert branches[0].copies and not branches[-1].copies
    for one in sessions:
        await one.close()


async def test_an_agent_that_does_not_repeat_itself_is_not_forked(chatml: PreTrainedTokenizerFast) -> None:
    tasks = build_tasks()
    async with serving(DrawingModel(chatml, tasks, max_turns=3, ends=0.0)) as gateway:
        parent = Recording(number=0)
        await play(gateway, parent, tasks[0], seed=5, environment=here)
        branch = Recording(number=1, fork=Fork(parent=parent, token=parent.nodes(1000).nodes[2].start))
        with pytest.raises(NotForked, match="the agent does not repeat its calls"):
            await play(gateway, branch, tasks[0], seed=6, environment=here, agent=Dated())
        # This one stops before the cut.
        branch = Recording(number=1, fork=branch.fork)
        with pytest.raises(NotForked, match="ended before the cut"):
            await play(gateway, branch, tasks[0], seed=6, environment=here, agent=ReActAgent(ReActOptions(max_turns=1)))
        await parent.close()


@needs_bubblewrap
async def test_forks_by_copy_and_by_replay_are_equal(chatml: PreTrainedTokenizerFast) -> None:
    """Of ten sessions; docs/benchmarks/learning.md has 200."""
    rows = await forked(chatml, 10, sandbox=HERE)
    assert all(row["same_reward"] and row["same_tokens"] for row in rows)
    assert all(row["places"] == row["turns"] for row in rows), "nothing overlaps in a session of one line"
    assert [row["replay_repeated_calls"] for row in rows] == [row["calls_before"] for row in rows]
    assert not any(row["copy_repeated_calls"] for row in rows)
    assert sum(row["left_parent"] for row in rows) >= 7 and len({row["copy_reward"] for row in rows}) == 2


@pytest.mark.parametrize(
    ("kind", "unconfined"),
    [
        *(pytest.param(kind, False, marks=needs_bubblewrap) for kind in ("clock", "random")),
        # In bubblewrap processes have equal numbers in all sessions.
        ("pid", True),
    ],
)
async def test_a_session_that_does_not_repeat_itself_is_forked_by_copy_alone(
    chatml: PreTrainedTokenizerFast, kind: str, unconfined: bool
) -> None:
    for row in await forked(chatml, 2, sandbox=SandboxOptions(unconfined=unconfined), restless=kind):
        assert ("copy_reward" in row) == (not unconfined) and "replay_reward" not in row
        assert row["replay_fault"].startswith("the session does not repeat itself: shell returned")
