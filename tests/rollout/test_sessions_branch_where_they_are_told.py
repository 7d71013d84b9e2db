"""Branches start from recorded tokens and an equal environment, by copy or by replay; all is real but the model."""

import asyncio
import random
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
from branching_sessions import (
    Dated,
    DrawingModel,
    Replayed,
    Restless,
    Tree,
    fork_both_ways,
    play,
    play_tree,
    serve,
    texts,
)
from sandboxes_here import HERE, needs_bubblewrap
from small_swe import all_tasks
from transformers import PreTrainedTokenizerFast

from tree_rl.rollout.agents.react import ReActAgent, ReActOptions
from tree_rl.rollout.branching.grow import BranchOptions
from tree_rl.rollout.branching.recording import Fork, NotForked, Recording
from tree_rl.rollout.environments.swe import SweEnvironment
from tree_rl.rollout.transcript import rows_of_calls
from tree_rl.tree import Forest

NAMES = sorted(all_tasks())
POLICIES = {
    "turns": {"options": {"expansions": 1}, "rounds": 2},
    "entropy": {"options": {"weight": 0.5, "penalty": 0.5}},
    "tail": {"rounds": 2},
    "fixed": {"options": {"every_tokens": 80, "depth": 3}, "rounds": 2},
}


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
    ("policy", "environment"), [(policy, (SweEnvironment, Replayed)[at % 2]) for at, policy in enumerate(POLICIES)]
)
async def test_every_policy_grows_a_tree(
    chatml: PreTrainedTokenizerFast, policy: str, environment: Callable[..., Any]
) -> None:
    options = BranchOptions(policy=policy, **POLICIES[policy])
    model = DrawingModel(chatml, max_turns=4)
    tree = await play_tree(model, all_tasks()[NAMES[1]], options, seed=4, environment=environment)
    check_tree(tree)
    replayed = sum(one.replayed_calls for one in tree.branches)
    before = sum(len(one.fork.tool_calls) for one in tree.branches if one.fork is not None)
    assert replayed == (before if environment is Replayed or HERE.unconfined else 0) and before > 0
    assert tree.branches[0].copies == (options.rounds > 1) and not tree.branches[-1].copies


async def test_a_budget_bounds_what_a_prompt_generates(chatml: PreTrainedTokenizerFast) -> None:
    free = BranchOptions(policy="fixed", options={"branches": 2, "depth": 2})
    wide = await play_tree(DrawingModel(chatml, max_turns=3), all_tasks()[NAMES[2]], free, seed=1)
    assert len(wide.branches) > 2
    # A branch counts as long as the session that it leaves.
    fork, first = wide.branches[0].fork, sum(one.generated_tokens for one in wide.first)
    assert fork is not None
    tight = replace(free, budget_tokens=first + fork.parent.generated_tokens - fork.token)
    narrow = await play_tree(DrawingModel(chatml, max_turns=3), all_tasks()[NAMES[2]], tight, seed=1)
    assert len(narrow.branches) == 1


async def test_sessions_that_do_not_repeat_themselves_are_not_forked(chatml: PreTrainedTokenizerFast) -> None:
    options = BranchOptions(policy="fixed")
    model = DrawingModel(chatml)
    tree = await play_tree(model, all_tasks()[NAMES[0]], options, environment=Restless)
    assert tree.branches and not any(one.calls for one in tree.branches), "none of them asked the model"
    faults = {one.fault.split(":")[0] for one in tree.branches if one.fault is not None}
    assert faults == {"the session does not repeat itself"}
    assert len([one for one in tree.branches if one.fault]) == len(tree.branches)
    assert tree.generated == sum(one.generated_tokens for one in tree.first)


async def test_an_agent_that_does_not_repeat_itself_is_not_forked(chatml: PreTrainedTokenizerFast) -> None:
    task = all_tasks()[NAMES[0]]
    async with serve(DrawingModel(chatml, max_turns=3, ends=0.0)) as gateway:
        parent = Recording(number=0)
        await play(gateway, parent, task, seed=5)
        branch = Recording(number=1, fork=Fork(parent=parent, token=parent.nodes(1000).nodes[2].start))
        with pytest.raises(NotForked, match="the agent does not repeat its calls"):
            await play(gateway, branch, task, seed=6, agent=Dated())
        # This one stops before the cut.
        branch = Recording(number=1, fork=branch.fork)
        with pytest.raises(NotForked, match="ended before the cut"):
            await play(gateway, branch, task, seed=6, agent=ReActAgent(ReActOptions(max_turns=1)))
        await parent.close()


async def both_ways(chatml: PreTrainedTokenizerFast, count: int) -> tuple[int, int, int]:
    """Branches of so many software sessions, each by copy and by replay; the numbers that differ, that left their
    parent's path, and that were solved."""
    rng = random.Random(7)
    different, moved, solved = 0, 0, 0
    async with serve(DrawingModel(chatml)) as gateway:
        for number in range(count):
            task = all_tasks()[NAMES[number % len(NAMES)]]
            parent = Recording(number=0)
            await play(gateway, parent, task, seed=number)
            nodes = parent.nodes(len(chatml)).nodes
            assert len(nodes) == len(parent.calls), "nothing overlaps in a session of one line"
            # At a turn's start, or within a turn.
            node = rng.choice(nodes[1:])
            token = node.start if number % 2 else rng.randrange(node.start, node.end)
            copied, replayed = await fork_both_ways(gateway, parent, task, token, seed=10_000 + number)
            different += texts(copied) != texts(replayed) or copied.reward != replayed.reward
            different += [t.result for t in copied.tool_calls] != [t.result for t in replayed.tool_calls]
            assert copied.fork is not None and len(copied.fork.tool_calls) == replayed.replayed_calls
            assert not copied.replayed_calls and all(tool.saved for tool in parent.tool_calls)
            moved += texts(copied) != texts(parent)
            solved += copied.reward == 1.0
            await parent.close()
    return different, moved, solved


@needs_bubblewrap
async def test_forks_by_copy_and_by_replay_are_equal(chatml: PreTrainedTokenizerFast) -> None:
    different, moved, _ = await both_ways(chatml, 4)
    assert not different and moved >= 3


@needs_bubblewrap
@pytest.mark.slow
@pytest.mark.timeout(3600)
def test_two_hundred_forks_by_copy_and_by_replay_are_equal(chatml: PreTrainedTokenizerFast) -> None:
    different, moved, solved = asyncio.run(both_ways(chatml, 200))
    assert not different and moved >= 190
    assert 20 < solved < 180, "the rewards must be able to differ"
