"""Branches start from recorded tokens and an equal environment, by copy or by replay; all is real but the model."""

import asyncio
import random
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path
from typing import Any

import pytest
from sandboxes_here import HERE, needs_bubblewrap
from transformers import PreTrainedTokenizerFast

from tree_rl.rollout.agents.react import ReActAgent, ReActOptions
from tree_rl.rollout.branching.grow import BranchOptions, grow
from tree_rl.rollout.branching.recording import Fork, NotForked, Recording
from tree_rl.rollout.environments.swe import SweEnvironment
from tree_rl.rollout.environments.swe_task import SweTask
from tree_rl.rollout.sandbox.sandbox import SandboxOptions
from tree_rl.rollout.transcript import rows_of_calls
from tree_rl.tree import Forest

sys.path.insert(0, str(Path(__file__).parents[2] / "benchmarks"))
from copy_and_replay import RESTLESS, DrawingModel, build_tasks, forked, play, serving

POLICIES = {
    "turns": {"options": {"expansions": 1}, "rounds": 2},
    "entropy": {"options": {"weight": 0.5, "penalty": 0.5}},
    "tail": {"rounds": 2},
    "fixed": {"options": {"every_tokens": 80, "depth": 3}, "rounds": 2},
}


@cache
def tasks() -> tuple[SweTask, ...]:
    return tuple(build_tasks())


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


@dataclass(kw_only=True)
class Tree:
    """A prompt's sessions and what the model generated for them."""

    first: list[Recording]
    branches: list[Recording]
    generated: int

    @property
    def finished(self) -> list[Recording]:
        return [one for one in (*self.first, *self.branches) if one.fault is None]


async def play_tree(
    model: DrawingModel,
    task: SweTask,
    options: BranchOptions,
    *,
    count: int = 2,
    seed: int = 0,
    environment: Callable[[], Any] = here,
) -> Tree:
    """A prompt's first sessions, and their branches."""
    async with serving(model) as gateway:
        first = [Recording(number=number, copies=options.copies) for number in range(count)]

        async def run(recording: Recording) -> None:
            await play(gateway, recording, task, seed=1000 * seed + recording.number, environment=environment)

        await asyncio.gather(*map(run, first))
        branches: list[Recording] = []
        await grow(
            first,
            run,
            options,
            branches=branches,
            number=count,
            rng=random.Random(seed),
            vocabulary=len(model.tokenizer),
        )
        for one in (*first, *branches):
            await one.close()
        return Tree(first=first, branches=branches, generated=model.generated)


def replayed() -> Replayed:
    return Replayed(HERE)


def check_tree(tree: Tree) -> None:
    """Every branch has its parent's tokens and log-probs before the cut, and tokens of its own after it."""
    assert all(one.fault is None for one in tree.branches) and tree.branches
    for one in tree.branches:
        assert one.fork is not None
        left, own = one.fork.token, 0
        for call, before in zip(one.calls, one.fork.parent.calls, strict=False):
            kept = min(left, len(before.response_ids))
            if left or not own:
                assert call.prompt_ids == before.prompt_ids
            assert call.response_ids[:kept] == before.response_ids[:kept]
            assert call.log_probs is not None and before.log_probs is not None
            assert call.log_probs[:kept] == before.log_probs[:kept]
            left, own = left - kept, len(call.response_ids) - kept
            if own:
                break
        assert left == 0 and one.generated_tokens > 0
    assert sum(one.generated_tokens for one in tree.finished) == tree.generated, "recorded tokens are not sampled again"
    # The trie merges what a branch shares with its parent.
    rows = [row.token_ids for one in tree.finished for row in rows_of_calls(one.calls)]
    trained = [row for one in tree.first for row in rows_of_calls(one.calls)]
    assert Forest.from_rows(rows).num_unique < sum(map(len, rows)) and trained


@pytest.mark.parametrize(
    ("policy", "environment"), [(policy, (here, replayed)[at % 2]) for at, policy in enumerate(POLICIES)]
)
async def test_every_policy_grows_a_tree(
    chatml: PreTrainedTokenizerFast, policy: str, environment: Callable[[], Any]
) -> None:
    options = BranchOptions(policy=policy, **POLICIES[policy])
    model = DrawingModel(chatml, tasks(), max_turns=4)
    tree = await play_tree(model, tasks()[1], options, seed=4, environment=environment)
    check_tree(tree)
    repeated = sum(one.replayed_calls for one in tree.branches)
    before = sum(len(one.fork.tool_calls) for one in tree.branches if one.fork is not None)
    assert repeated == (before if environment is replayed or HERE.unconfined else 0) and before > 0
    assert tree.branches[0].copies == (options.rounds > 1) and not tree.branches[-1].copies


async def test_a_budget_bounds_what_a_prompt_generates(chatml: PreTrainedTokenizerFast) -> None:
    free = BranchOptions(policy="fixed", options={"branches": 2, "depth": 2})
    wide = await play_tree(DrawingModel(chatml, tasks(), max_turns=3), tasks()[2], free, seed=1)
    assert len(wide.branches) > 2
    # A branch counts as long as the session that it leaves.
    fork, first = wide.branches[0].fork, sum(one.generated_tokens for one in wide.first)
    assert fork is not None
    tight = replace(free, budget_tokens=first + fork.parent.generated_tokens - fork.token)
    narrow = await play_tree(DrawingModel(chatml, tasks(), max_turns=3), tasks()[2], tight, seed=1)
    assert len(narrow.branches) == 1


@pytest.mark.parametrize("kind", ["clock", "random", "pid"])
async def test_sessions_that_do_not_repeat_themselves_are_not_forked(
    chatml: PreTrainedTokenizerFast, kind: str
) -> None:
    model = DrawingModel(chatml, tasks(), first=RESTLESS[kind])
    # In bubblewrap processes have equal numbers in all sessions.
    sandbox = SandboxOptions(unconfined=HERE.unconfined or kind == "pid")
    options = BranchOptions(policy="fixed", copies=False)
    tree = await play_tree(model, tasks()[0], options, environment=lambda: SweEnvironment(sandbox))
    assert tree.branches and not any(one.calls for one in tree.branches), "none of them asked the model"
    faults = {one.fault.split(":")[0] for one in tree.branches if one.fault is not None}
    assert faults == {"the session does not repeat itself"}
    assert len([one for one in tree.branches if one.fault]) == len(tree.branches)
    assert tree.generated == sum(one.generated_tokens for one in tree.first)


async def test_an_agent_that_does_not_repeat_itself_is_not_forked(chatml: PreTrainedTokenizerFast) -> None:
    task = tasks()[0]
    async with serving(DrawingModel(chatml, tasks(), max_turns=3, ends=0.0)) as gateway:
        parent = Recording(number=0)
        await play(gateway, parent, task, seed=5, environment=here)
        branch = Recording(number=1, fork=Fork(parent=parent, token=parent.nodes(1000).nodes[2].start))
        with pytest.raises(NotForked, match="the agent does not repeat its calls"):
            await play(gateway, branch, task, seed=6, environment=here, agent=Dated())
        # This one stops before the cut.
        branch = Recording(number=1, fork=branch.fork)
        with pytest.raises(NotForked, match="ended before the cut"):
            await play(gateway, branch, task, seed=6, environment=here, agent=ReActAgent(ReActOptions(max_turns=1)))
        await parent.close()


@needs_bubblewrap
async def test_forks_by_copy_and_by_replay_are_equal(chatml: PreTrainedTokenizerFast) -> None:
    """Of ten sessions; benchmarks/copy_and_replay.py forks 200."""
    rows = await forked(chatml, "steady", 10, sandbox=HERE)
    assert all(row["same_reward"] and row["same_tokens"] for row in rows)
    assert all(row["places"] == row["turns"] for row in rows), "nothing overlaps in a session of one line"
    assert [row["replay_repeated_calls"] for row in rows] == [row["calls_before"] for row in rows]
    assert not any(row["copy_repeated_calls"] for row in rows)
    assert sum(row["left_parent"] for row in rows) >= 7 and len({row["copy_reward"] for row in rows}) == 2


@needs_bubblewrap
async def test_a_session_that_does_not_repeat_itself_is_forked_by_copy_alone(chatml: PreTrainedTokenizerFast) -> None:
    for row in await forked(chatml, "clock", 2, sandbox=HERE):
        assert "copy_reward" in row and "replay_reward" not in row
        assert row["replay_fault"].startswith("the session does not repeat itself: shell returned")
