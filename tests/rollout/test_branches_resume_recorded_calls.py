"""At which calls a branch can start, and how the record answers its calls, token by token."""

import asyncio
import math
import random
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager, nullcontext
from pathlib import Path
from typing import Any

import pytest
from gateway_harness import TinyModel, serving
from react_scripts import BOTH, COPY, DONE, act, by_turn
from sandboxes_here import HERE, needs_bubblewrap
from small_swe import all_tasks

from tree_rl.rollout.agents.react import ReActOptions
from tree_rl.rollout.branching.grow import BranchOptions, grow
from tree_rl.rollout.branching.policies import Node
from tree_rl.rollout.branching.recorded_environment import RecordedEnvironment
from tree_rl.rollout.branching.recording import Fork, NotForked, RecordedCall, Recording
from tree_rl.rollout.environments import ShellEnvironment, ToolCall
from tree_rl.rollout.environments.swe import SweEnvironment
from tree_rl.rollout.gateway.backend import BackendError, Generation
from tree_rl.rollout.gateway.resumption import Resumption
from tree_rl.rollout.sandbox.errors import SandboxDied
from tree_rl.rollout.transcript import ModelCall, rows_of_calls


def call(start: float, end: float, *response: int, prompt: tuple[int, ...] = (1,), **more: Any) -> ModelCall:
    fields = {"log_probs": (-1.0,) * len(response), "finish_reason": "stop", **more}
    return ModelCall(prompt_ids=prompt, response_ids=response, seconds=(start, end), **fields)


def shell_call(command: str) -> ToolCall:
    return ToolCall(name="shell", arguments={"command": command})


def tool(start: float, end: float) -> RecordedCall:
    return RecordedCall(call=shell_call("ls"), result="", seconds=(start, end), began=0, ended=0)


def test_nodes_are_calls_of_the_main_line_that_nothing_overlaps() -> None:
    recording = Recording(number=0)
    recording.calls = (
        call(0, 1, 5, 6),
        # After a tool; its first 20 tokens make its entropy.
        call(3, 4, *[7] * 25, log_probs=(-2.0,) * 25),
        # Two in parallel, and a sub-agent that lives from 7 to 12.
        call(5, 6.5, 8),
        call(6, 6.8, 8),
        call(7, 8, 9, agent="sub"),
        call(9, 10, 9),
        call(11, 12, 9, agent="sub"),
        # No tool spoke since the call before.
        call(13, 14, 3, 4),
    )
    recording.tool_calls = [tool(1, 2), tool(4.1, 4.2)]
    logs = math.log(100)
    assert recording.nodes(100).nodes == (
        Node(start=0, end=2, turn=0, entropy=2 / logs, after_tool=False),
        Node(start=2, end=27, turn=1, entropy=40 / logs, after_tool=True),
        Node(start=32, end=34, turn=7, entropy=2 / logs, after_tool=False),
    )
    # A tool that still runs when a call begins is on no side of it.
    recording.tool_calls = [tool(2, 3.5)]
    assert [node.turn for node in recording.nodes(100).nodes] == [0, 7]


def test_a_branch_has_nodes_behind_its_cut() -> None:
    parent = Recording(number=0)
    parent.calls = (call(0, 1, 5, 6, 7), call(2, 3, 8))
    branch = Recording(number=1, fork=Fork(parent=parent, token=2))
    branch.calls = (call(4, 5, 5, 6, 9, 9), call(6, 7, 1))
    nodes = branch.nodes(100)
    assert [(node.start, node.end) for node in nodes.nodes] == [(2, 4), (4, 5)]
    assert (nodes.parent, nodes.cut, nodes.tokens, branch.generated_tokens) == (0, 2, 5, 3)


async def grown(play: Callable[[Recording, Recording], None], *, spent: int = 0, **options: Any) -> list[Recording]:
    """Branches, every five tokens, of a session of ten."""
    first, branches = Recording(number=0), list[Recording]()
    first.calls = (call(0, 1, *range(10)),)

    async def play_one(branch: Recording) -> None:
        play(branch, first)

    asked = BranchOptions(**{"policy": "fixed", "options": {"every_tokens": 5}, **options})
    rng = random.Random(0)
    await grow([first], play_one, asked, branches=branches, number=1, rng=rng, vocabulary=100, spent=spent)
    return branches


def repeat(branch: Recording, first: Recording) -> None:
    branch.calls = first.calls


@pytest.mark.parametrize(("spent", "count"), [(0, 1), (1, 0)])
async def test_sessions_that_failed_are_in_the_budget(spent: int, count: int) -> None:
    # 10 tokens of the first session, and 5 of a branch.
    assert len(await grown(repeat, budget_tokens=15, spent=spent)) == count


async def test_nothing_is_copied_in_the_last_round() -> None:
    branches = await grown(repeat, options={"every_tokens": 4, "depth": 2}, rounds=2)
    assert [branch.copies for branch in branches] == [True, True, False]


@pytest.mark.parametrize(
    ("session", "told", "error", "fault", "is_bug"),
    [
        ("", None, OSError("no port is free"), "no port is free", True),
        ("s", None, OSError("no port is free"), None, True),
        ("s", "it ended", NotForked("it ended"), "it ended", False),
    ],
    ids=["before it starts", "in its session", "known to its session"],
)
async def test_a_bug_of_a_branch_is_logged_with_its_traceback(
    session: str, told: str | None, error: Exception, fault: str | None, is_bug: bool, caplog: pytest.LogCaptureFixture
) -> None:
    def play(branch: Recording, first: Recording) -> None:
        branch.session, branch.fault = session, told
        raise error

    assert [branch.fault for branch in await grown(play)] == [fault]
    assert f"branch 1 is left out: {error}" in caplog.text and ("Traceback" in caplog.text) == is_bug


FILES = {"files": {"log": ""}, "check": "true"}


def forked(parent: Recording) -> Fork:
    """Behind all tool calls of a session."""
    parent.calls = (call(0, math.inf, 5), call(math.inf, math.inf, 6))
    return Fork(parent=parent, token=1)


@asynccontextmanager
async def started(recording: Recording, inner: ShellEnvironment | None = None) -> AsyncIterator[RecordedEnvironment]:
    environment = RecordedEnvironment(inner or ShellEnvironment(HERE), recording)
    await environment.reset(FILES)
    yield environment
    await environment.close()


@pytest.mark.parametrize("copies", [pytest.param(True, marks=needs_bubblewrap), False])
async def test_branches_of_branches_keep_the_order_of_concurrent_tool_calls(copies: bool) -> None:
    slow, fast = shell_call("sleep 0.5; echo slow >> log"), shell_call("echo fast >> log")
    parent = Recording(number=0, copies=copies)
    async with started(parent) as environment:
        await asyncio.gather(environment.call(slow), environment.call(fast))
    branch = Recording(number=1, fork=forked(parent), copies=copies)
    async with started(branch) as environment:
        # It asks in another order.
        for one in (slow, fast) if copies else (fast, slow):
            await environment.call(one)
    shell = ShellEnvironment(HERE)
    async with started(Recording(number=2, fork=forked(branch)), shell):
        # A copy is of the state after the last one's end; calls that are executed again begin in their old order.
        assert await shell.sandbox.read("log") == ("fast\nslow\n" if copies else "slow\nfast\n")
    await parent.close()


async def test_equal_calls_at_once_get_their_results_in_the_order_in_which_they_began() -> None:
    twice = shell_call("draw")
    times = [{"began": 0, "ended": 1, "result": "slow"}, {"began": 1, "ended": 0, "result": "fast"}]
    parent = Recording(number=0, tool_calls=[RecordedCall(call=twice, seconds=(0, 0), **time) for time in times])
    environment = RecordedEnvironment(ShellEnvironment(HERE), Recording(number=1, fork=forked(parent)))
    assert [await environment.call(twice) for _ in times] == ["slow", "fast"]


class Uncopied(ShellEnvironment):
    """Its copies fail halfway."""

    error: BaseException | None = None

    async def save(self, folder: Path) -> bool:
        (folder / "half").touch()
        if self.error is not None:
            raise self.error
        return False


@pytest.mark.parametrize("error", [OSError("full"), SandboxDied("gone"), None])
async def test_a_copy_that_fails_costs_the_session_nothing(error: BaseException | None) -> None:
    recording, inner = Recording(number=0), Uncopied(HERE)
    inner.error = error
    async with started(recording, inner) as environment:
        first = recording.folder_for_copy()
        assert [await environment.call(shell_call("echo a")) for _ in range(2)] == ["a"] * 2
        assert [made.saved for made in recording.tool_calls] == [None] * 2
        assert [*first.parent.iterdir()] == [first], "half a copy is deleted"
    await recording.close()


class OwnCall:
    async def call(self, call: ToolCall) -> str:
        return await super().call(call)  # type: ignore[misc]


@needs_bubblewrap
@pytest.mark.parametrize(
    ("base", "task"), [(ShellEnvironment, FILES), (SweEnvironment, {"swe": next(iter(all_tasks().values())).to_row()})]
)
async def test_files_of_an_environment_with_a_call_of_its_own_say_not_all(base: Any, task: Any, tmp_path: Path) -> None:
    for kind, is_copied in ((base, True), (type("Own", (OwnCall, base), {}), False)):
        environment = kind(HERE)
        await environment.reset(task)
        (tmp_path / str(is_copied)).mkdir()
        assert await environment.save(tmp_path / str(is_copied)) == is_copied
        await environment.close()


class Model:
    """Writes 99, and keeps what it was asked."""

    def __init__(self) -> None:
        self.asked: list[tuple[tuple[int, ...], int]] = []
        self.failures: list[Any] = []

    async def generate(self, prompt_ids: Sequence[int], *, max_tokens: int, **_: Any) -> Generation:
        self.asked.append((tuple(prompt_ids), max_tokens))
        failure = self.failures.pop() if self.failures else None
        if isinstance(failure, BackendError):
            raise failure
        if failure is not None:
            return Generation(token_ids=(98,), log_probs=(-8.0,), finish_reason=failure)
        return Generation(token_ids=(99,), log_probs=(-9.0,), finish_reason="stop")


async def ask(resumption: Resumption, *prompt: int, most: int = 50, **sampling: Any) -> tuple[Any, ...]:
    answer = await resumption.generate(prompt, max_tokens=most, sampling=sampling, session="s")
    return answer.token_ids, answer.log_probs, answer.finish_reason


FIRST = call(0, 1, 2, 3, 4)
LAST = call(2, 3, 5, 6, 7, prompt=(1, 2, 3, 4, 9))


def resumed(keep: int, *calls: ModelCall) -> tuple[Resumption, Model]:
    resumption, model = Resumption("s", calls or (FIRST,), LAST, keep), Model()
    resumption.before(model)
    return resumption, model


async def test_the_record_answers_up_to_the_cut_and_the_model_from_there() -> None:
    resumption, model = resumed(2)
    assert await ask(resumption, 1) == ((2, 3, 4), (-1.0,) * 3, "stop")
    assert not resumption.is_live and not model.asked
    assert await ask(resumption, 1, 2, 3, 4, 9) == ((5, 6, 99), (-1.0, -1.0, -9.0), "stop")
    assert model.asked == [((1, 2, 3, 4, 9, 5, 6), 48)] and resumption.is_live
    assert await ask(resumption, 1, most=7) == ((99,), (-9.0,), "stop")


async def test_a_turn_asked_for_in_slices_comes_in_slices() -> None:
    resumption, model = resumed(2)
    assert await ask(resumption, 1, most=2) == ((2, 3), (-1.0, -1.0), "length")
    assert await ask(resumption, 1, 2, 3, most=4) == ((4,), (-1.0,), "stop")
    assert await ask(resumption, *LAST.prompt_ids, most=1) == ((5,), (-1.0,), "length")
    assert await ask(resumption, *LAST.prompt_ids, 5, most=1) == ((6,), (-1.0,), "length")
    assert not resumption.is_live and not model.asked
    assert await ask(resumption, *LAST.prompt_ids, 5, 6, most=1) == ((99,), (-9.0,), "stop")
    assert resumption.is_live


async def test_a_cut_at_the_start_of_a_turn_samples_all_of_it() -> None:
    resumption, model = resumed(0)
    await ask(resumption, 1)
    assert await ask(resumption, *LAST.prompt_ids) == ((99,), (-9.0,), "stop")
    assert model.asked == [(LAST.prompt_ids, 50)]
    # A constrained turn also, wherever the cut is.
    resumption, model = resumed(2)
    await ask(resumption, 1)
    assert await ask(resumption, *LAST.prompt_ids, json_schema={}) == ((99,), (-9.0,), "stop")


@pytest.mark.parametrize("failure", [BackendError("busy"), "abort"])
async def test_the_turn_of_the_cut_is_asked_again_from_the_record(failure: Any) -> None:
    resumption, model = resumed(2)
    await ask(resumption, 1)
    model.failures.append(failure)
    with nullcontext() if failure == "abort" else pytest.raises(BackendError, match="busy"):
        assert (await ask(resumption, *LAST.prompt_ids))[2] == "abort"
    assert not resumption.is_live
    assert await ask(resumption, *LAST.prompt_ids) == ((5, 6, 99), (-1.0, -1.0, -9.0), "stop")
    assert resumption.is_live


async def test_a_constrained_turn_reports_its_real_cut() -> None:
    parent = Recording(number=0)
    parent.calls = (FIRST, LAST)
    for sampling, cut in ({}, 5), ({"json_schema": {}}, 3):
        fork = Fork(parent=parent, token=5)
        branch, resumption = Recording(number=1, fork=fork), fork.resumption()
        resumption.before(Model())
        await ask(resumption, 1)
        answer = await ask(resumption, *LAST.prompt_ids, **sampling)
        last = call(6, 7, *answer[0], prompt=LAST.prompt_ids)
        branch.finish("s", (FIRST, last), resumption)
        assert branch.fault is None and branch.nodes(100).cut == cut and branch.generated_tokens == 1


async def test_equal_prompts_get_the_answers_in_the_order_in_which_they_were_asked() -> None:
    resumption, _ = resumed(0, call(0.5, 0.6, 8), call(0.1, 0.9, 2))
    assert [(await ask(resumption, 1))[0] for _ in range(2)] == [(2,), (8,)]


async def test_another_prompt_ends_the_branch() -> None:
    for before in ((), (1,)):
        resumption, model = resumed(1)
        if before:
            await ask(resumption, *before)
        with pytest.raises(BackendError, match="does not repeat its calls") as refused:
            await ask(resumption, 1, 2, 3, 4, 8)
        assert refused.value.status == 403 and resumption.fault and not model.asked


@pytest.mark.parametrize(
    ("options", "gateway"),
    [
        (ReActOptions(think="strip"), {"reasoning": "inline"}),
        (ReActOptions(parallel_tools=False), {}),
        (ReActOptions(compact_after_tokens=10, max_turns=3), {}),
    ],
    ids=["stripped", "one_call", "compacted"],
)
async def test_branches_of_sessions_with_several_rows_repeat_them(
    tiny: Any, options: ReActOptions, gateway: dict[str, Any]
) -> None:
    model = TinyModel(tiny.model, tiny.tokenizer, by_turn(BOTH, COPY, DONE, DONE))

    async def play(server: Any, recording: Recording) -> None:
        resumption = None if recording.fork is None else recording.fork.resumption()
        session = server.open_session(sampling={"temperature": 1.0}, resumption=resumption)
        environment = RecordedEnvironment(ShellEnvironment(HERE), recording)
        done = await act(server.endpoint(session), environment, options)
        recording.finish(session.name, (await server.close_session(session)).calls, resumption)
        assert recording.fault is None and done.reward is not None
        recording.reward = done.reward

    async with serving(model, tiny.tokenizer, **gateway) as server:
        first = Recording(number=0)
        await play(server, first)
        assert len(rows_of_calls(first.calls)) > 1
        asked = len(model.prompts)
        last = first.nodes(1000).nodes[-1]
        assert last.turn == len(first.calls) - 1
        branch = Recording(number=1, fork=Fork(parent=first, token=last.start))
        await play(server, branch)
        assert len(model.prompts) == asked + 1, "only the last turn is new"
        assert [one.prompt_ids for one in branch.calls] == [one.prompt_ids for one in first.calls]
        assert branch.reward == first.reward
        await first.close()
