"""Branches start from recorded tokens and an equal environment, by copy or by replay; all is real but the model."""

import asyncio
import random
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import pytest
from gateway_harness import serving
from played_tasks import shell_call, task_of
from sandboxes_here import HERE, needs_bubblewrap
from small_swe import all_tasks, generator, writing
from transformers import PreTrainedTokenizerFast

from tree_rl.rollout.agents.in_environment import run_task
from tree_rl.rollout.agents.react import ReActAgent, ReActOptions
from tree_rl.rollout.branching.grow import BranchOptions, grow
from tree_rl.rollout.branching.recorded_environment import RecordedEnvironment
from tree_rl.rollout.branching.recording import Fork, NotForked, Recording
from tree_rl.rollout.environments.swe import SweEnvironment
from tree_rl.rollout.environments.swe_task import SweTask
from tree_rl.rollout.gateway.backend import Generation
from tree_rl.rollout.gateway.gateway import Gateway
from tree_rl.rollout.transcript import rows_of_calls
from tree_rl.tree import Forest

COMMANDS = (
    "ls -R && cat *.py",
    "mkdir -p notes/empty && echo seen >> notes/log && wc -l notes/log",
    "ln -sf log notes/link; ls notes",
    "printf 'print(1)\\n' > run.sh && chmod 755 run.sh && stat -c '%a %n' run.sh",
    "python3 -c 'import glob; print(sorted(glob.glob(\"**\", recursive=True)))'",
    "rm -f run.sh; false",
)
"""What the model does besides repairing, breaking and ending. Their output tells the state of the files."""


class DrawingModel:
    """Draws a turn from the seed of the call; a turn may be asked for from any of its tokens on."""

    def __init__(self, tokenizer: PreTrainedTokenizerFast, max_turns: int = 5, ends: float = 0.2) -> None:
        self.tokenizer, self.max_turns, self.ends = tokenizer, max_turns, ends
        self.generated = 0
        self.prompts: list[tuple[int, ...]] = []

    async def generate(
        self, prompt_ids: Sequence[int], *, max_tokens: int, sampling: Mapping[str, Any], session: str
    ) -> Generation:
        self.prompts.append(tuple(prompt_ids))
        prompt = self.tokenizer.decode(list(prompt_ids))
        rng = random.Random(sampling["seed"])
        before, _, started = prompt.rpartition("<|im_start|>assistant\n")
        text = self._turn(prompt, before.count("<|im_start|>assistant"), rng)
        if started:
            # It goes on after what a branch kept: with any words and one call.
            text = f" {rng.randrange(1000)}" + (text if "<tool_call>" not in started else "")
        ids = [*self.tokenizer.encode(text, add_special_tokens=False), self.tokenizer.eos_token_id][:max_tokens]
        self.generated += len(ids)
        log_probs = tuple(-rng.random() for _ in ids)
        finish = "stop" if ids[-1] == self.tokenizer.eos_token_id else "length"
        return Generation(token_ids=tuple(ids), log_probs=log_probs, finish_reason=finish)

    def _turn(self, prompt: str, turn: int, rng: random.Random) -> str:
        thought = f"step {rng.randrange(1000)}\n"
        if turn >= self.max_turns - 1 or (turn and rng.random() < self.ends):
            return thought + "done"
        if rng.random() < 0.35:
            return thought + shell_call(writing(dict(task_of(prompt).solution_files)))
        return thought + shell_call(rng.choice(COMMANDS))


class Replayed(SweEnvironment):
    """Has a `call` of its own, so its files say not all."""

    async def call(self, call: Any) -> str:
        return await super().call(call)


class Restless(Replayed):
    """Answers otherwise each time."""

    async def call(self, call: Any) -> str:
        return f"{await super().call(call)}\n{random.SystemRandom().random()}"


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


async def play(
    gateway: Gateway,
    recording: Recording,
    task: SweTask,
    *,
    seed: int,
    environment: Callable[..., Any] = SweEnvironment,
    agent: ReActAgent | None = None,
) -> None:
    """One session, as verl's agent loop plays it."""
    resumption = None if recording.fork is None else recording.fork.resumption()
    session = gateway.open_session(sampling={"seed": seed}, resumption=resumption)
    done = await run_task(
        agent=agent or ReActAgent(ReActOptions(max_turns=8)),
        environment=RecordedEnvironment(environment(HERE), recording),
        endpoint=gateway.endpoint(session),
        task={"swe": task.to_row()},
        messages=generator().to_row(task, 0, "train")["prompt"],
        timeout_seconds=60,
    )
    recording.finish(session.name, (await gateway.close_session(session)).calls, resumption)
    if recording.fault is not None:
        raise NotForked(recording.fault)
    assert done.status == "completed" and done.reward is not None, done
    recording.reward = done.reward


def serve(model: DrawingModel, **options: Any) -> Any:
    return serving(model, model.tokenizer, **{"max_context_tokens": 20_000, "max_turn_tokens": 4000, **options})


async def play_tree(
    model: DrawingModel,
    task: SweTask,
    options: BranchOptions,
    *,
    count: int = 2,
    seed: int = 0,
    environment: Callable[..., Any] = SweEnvironment,
) -> Tree:
    """A prompt's first sessions, and their branches."""
    async with serve(model) as gateway:
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


async def fork_both_ways(gateway: Gateway, parent: Recording, task: SweTask, token: int, seed: int) -> list[Recording]:
    """A branch from a copy of the files, and the same by repeated calls, with the same seed."""
    made = []
    for copies in (True, False):
        source = parent if copies else replace(parent, tool_calls=[replace(t, saved=None) for t in parent.tool_calls])
        branch = Recording(number=1, fork=Fork(parent=source, token=token), copies=False)
        await play(gateway, branch, task, seed=seed)
        made.append(branch)
    return made


def texts(recording: Recording) -> list[tuple[tuple[int, ...], tuple[int, ...], tuple[float, ...] | None]]:
    """What the calls of a session were asked and answered, and the log-probs."""
    return [(call.prompt_ids, call.response_ids, call.log_probs) for call in recording.calls]


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
