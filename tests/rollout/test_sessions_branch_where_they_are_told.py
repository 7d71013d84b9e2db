"""Branches start from recorded tokens and an equal environment, by copy or by replay; all is real but the model."""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
from branching_sessions import Dated, Replayed, Tree, here, play_tree, tasks
from copy_and_replay import RESTLESS, DrawingModel, forked, play, serving
from sandboxes_here import HERE, needs_bubblewrap
from transformers import PreTrainedTokenizerFast

from tree_rl.rollout.agents.react import ReActAgent, ReActOptions
from tree_rl.rollout.branching.grow import BranchOptions
from tree_rl.rollout.branching.recording import Fork, NotForked, Recording
from tree_rl.rollout.environments.swe import SweEnvironment
from tree_rl.rollout.sandbox.sandbox import SandboxOptions
from tree_rl.rollout.transcript import rows_of_calls
from tree_rl.tree import Forest

POLICIES = {
    "turns": {"options": {"expansions": 1}, "rounds": 2},
    "entropy": {"options": {"weight": 0.5, "penalty": 0.5}},
    "tail": {"rounds": 2},
    "fixed": {"options": {"every_tokens": 80, "depth": 3}, "rounds": 2},
}


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
