"""The adapters of OpenEnv and verifiers, with the real packages: a server of OpenEnv, a taskset of verifiers."""

import asyncio
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from live_processes import wait_for
from small_swe import OUTCOME

from tree_rl.rollout.agents.agents_by_name import build, check
from tree_rl.rollout.environments import Environment, ToolCall
from tree_rl.rollout.sandbox.sandbox import SandboxDied, SandboxError

TASKSET = '''\
import verifiers.v1 as vf


class SumsData(vf.TaskData):
    answer: int


class Memory(vf.State):
    numbers: list[int] = []


class Calculator(vf.Toolset[vf.ToolsetConfig, Memory]):
    async def setup_task(self, task):
        self.asked = task.prompt

    @vf.tool
    def add(self, a: int, b: int = 1) -> int:
        """Add two numbers."""
        return a + b

    @vf.tool
    async def remember(self, number: int) -> str:
        """Keep a number."""
        self.state.numbers.append(number)
        return f"{self.asked} {self.state.numbers}"

    @vf.tool
    def fail(self) -> str:
        """Raise."""
        raise OSError("no such thing")


class SumsTask(vf.Task[SumsData, vf.State, vf.TaskConfig]):
    @vf.reward(weight=2.0)
    async def right(self, task, trace) -> float:
        return float(trace.last_reply == str(task.answer))

    @vf.reward(weight=0.5)
    async def calls(self, trace) -> float:
        return float(sum(len(message.tool_calls or []) for message in trace.assistant_messages))

    @classmethod
    def toolsets(cls, config):
        return [Calculator(vf.ToolsetConfig())]


class NeedsRuntime(SumsTask):
    @vf.reward
    async def in_box(self, runtime) -> float:
        return 1.0


class SumsConfig(vf.TasksetConfig):
    kind: str = "plain"


class Sums(vf.Taskset[SumsTask, SumsConfig]):
    def load(self):
        kind = {"plain": SumsTask, "runtime": NeedsRuntime}[self.config.kind]
        for number in range(3):
            yield kind(SumsData(prompt=f"What is {number} + 1?", answer=number + 1), self.config.task)


__all__ = ["Sums"]
'''


def call(name: str, **arguments: Any) -> ToolCall:
    return ToolCall(name=name, arguments=arguments)


def environment_of(name: str, **options: Any) -> Environment:
    check({"environment": name, "environment_options": options}, is_this_machine=True)
    return build("react", None, name, None, options)[1]


@pytest.fixture
def sums(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    pytest.importorskip("verifiers.v1")
    (tmp_path / "sums_for_tests.py").write_text(TASKSET)
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.delitem(sys.modules, "sums_for_tests", raising=False)
    return "sums_for_tests"


async def test_sessions_of_a_taskset_of_verifiers_have_its_tools_and_scores_and_share_nothing(sums: str) -> None:
    async def play(idx: int) -> float:
        environment = environment_of("verifiers", taskset=sums)
        await environment.reset({"idx": idx})
        tools = {tool["function"]["name"]: tool["function"] for tool in environment.tools()}
        assert set(tools) == {"calculator_add", "calculator_remember", "calculator_fail"}
        assert tools["calculator_add"]["description"] == "Add two numbers."
        assert tools["calculator_add"]["parameters"]["required"] == ["a"]
        assert await environment.call(call("calculator_add", a=1)) == "2"
        for said in ("[3]", "[3, 3]"):
            assert await environment.call(call("calculator_remember", number=3)) == f"What is {idx} + 1? {said}"
        assert (await environment.call(call("calculator_add", a="x"))).startswith("error: 1 validation error")
        assert await environment.call(call("calculator_fail")) == "error: OSError: no such thing"
        assert "the tools are calculator_add" in await environment.call(call("add", a=1))
        await environment.stop()
        assert await environment.call(call("calculator_add", a=1)) == "error: the session has ended"
        reward = await environment.score(replace(OUTCOME, answer="1"))
        await environment.close()
        return reward

    assert await asyncio.gather(play(0), play(2)) == [2.0 + 0.5 * 5, 0.5 * 5]


@pytest.mark.parametrize(
    ("options", "row", "message"),
    [
        ({"config": {"kind": "runtime"}}, {"idx": 0}, r"NeedsRuntime needs verifiers' own runtime \(in_box\)"),
        ({}, {"idx": 7}, r"extra_info\.idx=7: sums_for_tests has no such task"),
        ({}, {}, r"extra_info\.idx: expected the position"),
        ({"taskset": "nowhere"}, {}, r"environment_options\.taskset=nowhere: ModuleNotFoundError"),
        ({"config": {"colour": "red"}}, {}, r"environment_options\.taskset=sums_for_tests: ValidationError"),
        ({"taskset": None}, {}, r"agent_options\.environment_options\.taskset: expected a value"),
    ],
)
def test_tasksets_that_cannot_be_played_are_refused_by_name(sums: str, options: Any, row: Any, message: str) -> None:
    given = {name: value for name, value in {"taskset": sums, **options}.items() if value is not None}
    with pytest.raises(ValueError, match=message):
        asyncio.run(environment_of("verifiers", **given).reset(row))


@contextmanager
def served(app: Any) -> Iterator[str]:
    import uvicorn

    server = uvicorn.Server(uvicorn.Config(app, host="127.0.0.1", port=0, log_level="error"))
    thread = threading.Thread(target=server.run)
    thread.start()
    try:
        wait_for(lambda: server.started, 30)
        yield f"http://127.0.0.1:{server.servers[0].sockets[0].getsockname()[1]}"
    finally:
        server.should_exit = True
        thread.join()


def guessing_app() -> Any:
    """A plain environment of OpenEnv: guess a number; 1 for a hit, -0.1 for a miss."""
    env_server = pytest.importorskip("openenv.core.env_server")

    class Guess(env_server.Action):
        number: int

    class Hint(env_server.Observation):
        hint: str

    class GuessWorld(env_server.Environment):
        SUPPORTS_CONCURRENT_SESSIONS = True

        def reset(self, seed: int | None = None, episode_id: str | None = None, number: int = 5) -> Hint:
            self.number = number
            return Hint(hint=f"below {2 * number}")

        def step(self, action: Guess, timeout_s: float | None = None) -> Hint:
            if action.number < 0:
                raise RuntimeError("no negative numbers")
            is_hit = action.number == self.number
            return Hint(hint="yes" if is_hit else "no", done=is_hit, reward=1.0 if is_hit else -0.1)

        @property
        def state(self) -> Any:
            return env_server.State()

    return env_server.create_fastapi_app(GuessWorld, Guess, Hint, max_concurrent_envs=4)


def tools_app() -> Any:
    """An environment of OpenEnv whose tools are MCP's."""
    pytest.importorskip("openenv.core.env_server")
    from fastmcp import FastMCP
    from openenv.core.env_server import Observation, State, create_fastapi_app
    from openenv.core.env_server.mcp_environment import MCPEnvironment
    from openenv.core.env_server.mcp_types import CallToolAction, CallToolObservation

    class Tools(MCPEnvironment):
        SUPPORTS_CONCURRENT_SESSIONS = True

        def __init__(self) -> None:
            mcp = FastMCP("tools")

            @mcp.tool
            def double(number: int) -> int:
                """Double a number."""
                return 2 * number

            super().__init__(mcp)

        def reset(self, **kwargs: Any) -> Observation:
            return Observation()

        def _step_impl(self, action: Any, **kwargs: Any) -> Observation:
            raise ValueError(f"no such action: {action}")

        async def step_async(self, action: Any, **kwargs: Any) -> Observation:
            observation = await super().step_async(action, **kwargs)
            if isinstance(observation, CallToolObservation) and observation.error is None:
                observation.reward = 0.25
            return observation

        @property
        def state(self) -> State:
            return State()

    return create_fastapi_app(Tools, CallToolAction, CallToolObservation, max_concurrent_envs=4)


async def test_a_plain_server_of_openenv_is_one_tool_and_its_rewards_add_up() -> None:
    async def play(url: str, number: int) -> float:
        environment = environment_of("openenv", base_url=url, reset={"number": 7})
        await environment.reset({"reset": {"number": number, "seed": None}})
        [tool] = environment.tools()
        assert tool["function"]["name"] == "step" and f"below {2 * number}" in tool["function"]["description"]
        assert set(tool["function"]["parameters"]["properties"]) == {"number"}
        answers = await asyncio.gather(*(environment.call(call("step", number=one)) for one in (1, 2)))
        assert all('"no"' in answer for answer in answers)
        assert (await environment.call(call("step", colour="red"))).startswith("error: Server error")
        assert "no negative numbers" in await environment.call(call("step", number=-1))
        assert "the tools are step" in await environment.call(call("shell", command="ls"))
        assert '"yes"' in await environment.call(call("step", number=number))
        assert await environment.call(call("step", number=number)) == "error: the episode has ended"
        await environment.stop()
        with pytest.raises(SandboxDied, match="stopped"):
            await environment.call(call("step", number=number))
        await environment.close()
        return await environment.score(OUTCOME)

    with served(guessing_app()) as url:
        assert await asyncio.gather(play(url, 5), play(url, 6)) == pytest.approx([0.8, 0.8])


async def test_tools_of_a_server_of_openenv_are_shown_as_they_are() -> None:
    with served(tools_app()) as url:
        environment = environment_of("openenv", base_url=url)
        await environment.reset({})
        [tool] = environment.tools()
        assert tool["function"]["name"] == "double" and tool["function"]["description"] == "Double a number."
        assert set(tool["function"]["parameters"]["properties"]) == {"number"}
        assert await environment.call(call("double", number=4)) == "8"
        assert (await environment.call(call("double", number="x"))).startswith("error: ")
        await environment.stop()
        assert await environment.score(OUTCOME) == 0.25


async def test_a_server_of_openenv_that_is_gone_is_named() -> None:
    app = guessing_app()
    with pytest.raises(ValueError, match=r"environment_options\.base_url='localhost': expected such as http"):
        environment_of("openenv", base_url="localhost")
    with served(app) as url:
        environment = environment_of("openenv", base_url=url)
        await environment.reset({})
    with pytest.raises(SandboxDied, match=f"{url} does not answer"):
        await environment.call(call("step", number=1))
    await environment.close()
    with pytest.raises(SandboxError, match=rf"base_url={url}: the server starts no episode"):
        await environment_of("openenv", base_url=url).reset({})
