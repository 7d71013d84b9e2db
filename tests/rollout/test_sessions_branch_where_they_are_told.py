"""Branches start from recorded tokens and an equal environment, by copy or by replay; all is real but the model.

The model draws its turns in software tasks.
"""

import random
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import pytest
from gateway_harness import serving
from protocol_turns import shell
from sandboxes_here import HERE, needs_bubblewrap
from small_swe import all_tasks, work_on, writing
from transformers import PreTrainedTokenizerFast

from tree_rl.rollout.agents.react import ReActAgent, ReActOptions
from tree_rl.rollout.branching.recorded_environment import RecordedEnvironment
from tree_rl.rollout.branching.recording import Fork, NotForked, Recording
from tree_rl.rollout.environments.swe import SweEnvironment
from tree_rl.rollout.environments.swe_task import SweTask
from tree_rl.rollout.gateway.backend import Generation
from tree_rl.rollout.gateway.gateway import Gateway
from tree_rl.rollout.sandbox.sandbox import SandboxOptions

TASKS = list(all_tasks().values())
ROOM = {"max_context_tokens": 20_000, "max_turn_tokens": 4000}
MAX_TURNS = 5
COMMANDS = (
    "ls -R && cat *.py",
    "mkdir -p notes/empty && echo seen >> notes/log && wc -l notes/log",
    "ln -sf log notes/link; ls notes",
    "printf 'print(1)\\n' > run.sh && chmod 755 run.sh && stat -c '%a %n' run.sh",
    "python3 -c 'import glob; print(sorted(glob.glob(\"**\", recursive=True)))'",
    "rm -f run.sh; false",
)
"""What the model does besides repairing and ending. Their output tells the state of the files."""


class DrawingModel:
    """Draws a turn from the seed of the call, the first if none is given, and the rest of a turn that is begun."""

    def __init__(self, tokenizer: PreTrainedTokenizerFast, first: str | None = None) -> None:
        self.tokenizer, self.first, self.generated = tokenizer, first, 0

    async def generate(
        self, prompt_ids: Sequence[int], *, max_tokens: int, sampling: Mapping[str, Any], session: str
    ) -> Generation:
        """Write the rest of a turn."""
        prompt = self.tokenizer.decode(list(prompt_ids))
        rng = random.Random(sampling["seed"])
        before, _, started = prompt.rpartition("<|im_start|>assistant\n")
        text = self._turn(prompt, before.count("<|im_start|>assistant"), rng)
        if started:
            # It goes on after what a branch kept: with any words and one call.
            text = f" {rng.randrange(1000)}" + (text if "<tool_call>" not in started else "")
        ids = [*self.tokenizer.encode(text, add_special_tokens=False), self.tokenizer.eos_token_id][:max_tokens]
        self.generated += len(ids)
        finish = "stop" if ids[-1] == self.tokenizer.eos_token_id else "length"
        return Generation(token_ids=tuple(ids), log_probs=tuple(-rng.random() for _ in ids), finish_reason=finish)

    def _turn(self, prompt: str, turn: int, rng: random.Random) -> str:
        thought = f"step {rng.randrange(1000)}\n"
        if not turn and self.first is not None:
            return thought + shell(self.first)
        if turn >= MAX_TURNS - 1 or (turn and rng.random() < 0.2):
            return thought + "done"
        if rng.random() < 0.35:
            (task,) = [task for task in TASKS if task.problem_statement in prompt]
            return thought + shell(writing(dict(task.solution_files)))
        return thought + shell(rng.choice(COMMANDS))


async def play(
    gateway: Gateway,
    recording: Recording,
    task: SweTask,
    *,
    seed: int,
    sandbox: SandboxOptions = HERE,
    agent: ReActAgent | None = None,
) -> None:
    """One session, as verl's agent loop plays it; raises `NotForked` for a branch that did not come to its cut."""
    resumption = None if recording.fork is None else recording.fork.resumption()
    session = gateway.open_session(sampling={"seed": seed}, resumption=resumption)
    environment, endpoint = RecordedEnvironment(SweEnvironment(sandbox), recording), gateway.endpoint(session)
    done = await work_on(task, agent=agent or ReActAgent(), environment=environment, endpoint=endpoint)
    recording.finish(session.name, (await gateway.close_session(session)).calls, resumption)
    if recording.fault is not None:
        raise NotForked(recording.fault)
    assert done.status == "completed" and done.reward is not None, f"{task.instance_id}: {done}"
    recording.reward = done.reward


async def forked(
    tokenizer: PreTrainedTokenizerFast, count: int, *, sandbox: SandboxOptions, first: str | None = None
) -> list[tuple[Recording, Recording, Recording]]:
    """So many sessions, and a branch of each from a copy and by repeated calls, with one seed.

    Even ones are cut at a token within a turn, odd ones at a turn's start.
    """
    model, rng, played = DrawingModel(tokenizer, first), random.Random(0), []
    async with serving(model, tokenizer, **ROOM) as gateway:
        for number in range(count):
            task, parent = TASKS[number], Recording(number=0)
            await play(gateway, parent, task, seed=rng.randrange(1 << 30), sandbox=sandbox)
            node = rng.choice(parent.nodes(len(tokenizer)).nodes[1:])
            token = node.start if number % 2 else rng.randrange(node.start, node.end)
            without = replace(parent, tool_calls=[replace(call, saved=None) for call in parent.tool_calls])
            copy, replay = (Recording(number=1, fork=Fork(parent=one, token=token)) for one in (parent, without))
            seed = rng.randrange(1 << 30)
            for branch in (copy, replay):
                try:
                    await play(gateway, branch, task, seed=seed, sandbox=sandbox)
                except NotForked as error:
                    assert branch.fault and branch.fault in str(error)
            played.append((parent, copy, replay))
            for one in played[-1]:
                await one.close()
    new = sum(one.generated_tokens for session in played for one in session)
    assert model.generated == new or first, "recorded tokens are not sampled again"
    return played


def said(recording: Recording) -> list[Any]:
    """What the calls of a session were asked and answered, and the log-probs."""
    return [(call.prompt_ids, call.response_ids, call.log_probs) for call in recording.calls]


class Dated(ReActAgent):
    """Writes something else into each session's first message."""

    async def run(self, messages: Sequence[Mapping[str, Any]], **others: Any) -> Any:
        text = f"{messages[-1]['content']} {random.SystemRandom().random()}"
        return await super().run([*messages[:-1], {**messages[-1], "content": text}], **others)


@pytest.mark.parametrize(
    ("agent", "fault"),
    [
        (Dated(), "the agent does not repeat its calls"),
        (ReActAgent(ReActOptions(max_turns=1)), "ended before the cut"),
    ],
)
async def test_an_agent_that_does_not_repeat_itself_is_not_forked(
    chatml: PreTrainedTokenizerFast, agent: ReActAgent, fault: str
) -> None:
    async with serving(DrawingModel(chatml), chatml, **ROOM) as gateway:
        parent = Recording(number=0)
        await play(gateway, parent, TASKS[0], seed=3)
        branch = Recording(number=1, fork=Fork(parent=parent, token=parent.nodes(1000).nodes[2].start))
        with pytest.raises(NotForked, match=fault):
            await play(gateway, branch, TASKS[0], seed=4, agent=agent)
        await parent.close()


@needs_bubblewrap
async def test_forks_by_copy_and_by_replay_are_equal(chatml: PreTrainedTokenizerFast) -> None:
    """Of ten sessions; docs/benchmarks/learning.md has 200."""
    played = await forked(chatml, 10, sandbox=HERE)
    for parent, copy, replay in played:
        assert len(parent.nodes(len(chatml)).nodes) == len(parent.calls), "nothing overlaps in a session of one line"
        assert (copy.fault, copy.reward, said(copy)) == (None, replay.reward, said(replay))
        assert [call.result for call in copy.tool_calls] == [call.result for call in replay.tool_calls]
        assert copy.fork is not None
        assert (copy.replayed_calls, replay.replayed_calls) == (0, len(copy.fork.tool_calls))
    assert sum(said(copy) != said(parent) for parent, copy, _ in played) >= 7
    assert len({copy.reward for _, copy, _ in played}) == 2


@pytest.mark.parametrize(
    ("command", "unconfined"),
    [
        *(
            pytest.param(command, False, marks=needs_bubblewrap)
            for command in ("date +%s%N", "python3 -c 'import random; print(random.random())'")
        ),
        # In bubblewrap processes have equal numbers in all sessions.
        ("echo $$", True),
    ],
    ids=["clock", "random", "pid"],
)
async def test_a_session_that_does_not_repeat_itself_is_forked_by_copy_alone(
    chatml: PreTrainedTokenizerFast, command: str, unconfined: bool
) -> None:
    sandbox = SandboxOptions(unconfined=unconfined)
    for _, copy, replay in await forked(chatml, 2, sandbox=sandbox, first=command):
        assert (copy.fault is None) == (not unconfined) and replay.fault is not None
        assert replay.fault.startswith("the session does not repeat itself: shell returned")
