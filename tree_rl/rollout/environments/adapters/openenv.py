"""An environment on a server of OpenEnv (package `openenv`), which computes the rewards; an agent only has tools."""

import asyncio
import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any
from urllib.parse import urlsplit

import httpx
from openenv.core.generic_client import GenericEnvClient
from websockets.exceptions import WebSocketException

from tree_rl.rollout.environments.environment import Outcome, ToolCall, tool
from tree_rl.rollout.sandbox.errors import SandboxDied, SandboxError

KEY = "environment_options"
STEP = "step"
"""Name of the only tool of an environment without MCP tools."""
MCP_FIELDS = {"tool_name", "arguments"}
"""Fields of an action in an environment with MCP tools."""


@dataclass(frozen=True, kw_only=True, slots=True)
class OpenEnvOptions:
    """Options of an OpenEnv server. Raises `ValueError` if `base_url` is no address; names the key."""

    base_url: str
    """Address of the running server, such as `http://localhost:8000`."""
    message_timeout_seconds: float = 60.0
    """Limit for one answer of the server."""
    reset: Mapping[str, Any] = field(default_factory=dict)
    """Arguments of every reset; a task's `extra_info.reset` overrides them."""

    def __post_init__(self) -> None:
        if urlsplit(self.base_url).scheme not in ("http", "https") or not urlsplit(self.base_url).hostname:
            raise ValueError(f"{KEY}.base_url={self.base_url!r}: expected such as http://localhost:8000")


class OpenEnvEnvironment:
    """One episode on an OpenEnv server. The reward is the sum of the rewards of its steps.

    Without MCP tools, the only tool is `step`, whose arguments are the action's fields.
    """

    def __init__(self, options: OpenEnvOptions) -> None:
        self.options = options
        self._client: GenericEnvClient | None = None
        self._tools: list[Mapping[str, Any]] = []
        self._has_tools = False
        self._rewards: list[float] = []
        self._is_done = False
        self._one_at_a_time = asyncio.Lock()

    async def reset(self, task: Mapping[str, Any]) -> None:
        """Start an episode with `extra_info.reset`. Raises `SandboxError` if the server does not answer."""
        # A column of a data set has the keys of all rows; a row's absent keys are None.
        given = {key: value for key, value in (task.get("reset") or {}).items() if value is not None}
        try:
            action = await self._action_schema()
            self._client = GenericEnvClient(
                base_url=self.options.base_url, message_timeout_s=self.options.message_timeout_seconds
            )
            await self._client.connect()
            start = await self._client.reset(**{**self.options.reset, **given})
            self._has_tools = set(action.get("properties", {})) >= MCP_FIELDS
            if self._has_tools:
                listed = await self._client.step({"type": "list_tools"})
                self._tools = [
                    tool(one["name"], one["description"], one["input_schema"]) for one in listed.observation["tools"]
                ]
            else:
                self._tools = [_step_tool(action, start.observation)]
        except (OSError, RuntimeError, KeyError, WebSocketException, httpx.HTTPError) as error:
            raise SandboxError(
                f"{KEY}.base_url={self.options.base_url}: the server starts no episode: {type(error).__name__}: {error}"
            ) from error

    async def _action_schema(self) -> Mapping[str, Any]:
        async with httpx.AsyncClient(timeout=self.options.message_timeout_seconds) as http:
            answer = await http.get(f"{self.options.base_url.rstrip('/')}/schema")
        answer.raise_for_status()
        return answer.json()["action"]

    def tools(self) -> Sequence[Mapping[str, Any]]:
        return self._tools

    async def call(self, call: ToolCall) -> str:
        """Take a step. The agent sees the server's errors; raises `SandboxDied` if the server does not answer."""
        names = [one["function"]["name"] for one in self._tools]
        if call.name not in names:
            return f"error: unknown tool {call.name!r}; the tools are {', '.join(names)}"
        arguments = dict(call.arguments)
        action = {"type": "call_tool", "tool_name": call.name, "arguments": arguments} if self._has_tools else arguments
        async with self._one_at_a_time:
            if self._client is None:
                raise SandboxDied("the episode was stopped")
            if self._is_done:
                return "error: the episode has ended"
            try:
                result = await self._client.step(action)
            except RuntimeError as error:
                return f"error: {error}"
            except (OSError, WebSocketException) as error:
                raise SandboxDied(
                    f"{self.options.base_url} does not answer: {type(error).__name__}: {error}"
                ) from error
        # No reward is not the same as a reward of 0.
        if result.reward is not None:
            self._rewards.append(float(result.reward))
        self._is_done = bool(result.done)
        return _read(result.observation)

    async def stop(self) -> None:
        async with self._one_at_a_time:
            client, self._client = self._client, None
        if client is not None:
            await client.close()

    async def score(self, outcome: Outcome) -> float:
        """Sum of the server's rewards. Raises `ValueError` if it is not finite."""
        reward = sum(self._rewards)
        if not math.isfinite(reward):
            raise ValueError(f"{self.options.base_url}: expected finite rewards, received {self._rewards}")
        return reward

    async def close(self) -> None:
        await self.stop()


def _step_tool(action: Mapping[str, Any], start: Mapping[str, Any]) -> Mapping[str, Any]:
    """The action as a tool. Its description contains the first observation, which agents see nowhere else."""
    parameters = {**action, "properties": {k: v for k, v in action["properties"].items() if k != "metadata"}}
    description = action.get("description") or "Take a step."
    return tool(STEP, f"{description}\nThe episode begins with: {_read(start)}", parameters)


def _read(observation: Mapping[str, Any]) -> str:
    """An observation's text for the agent: the result of a tool, or the fields."""
    if error := observation.get("error"):
        return f"error: {error.get('message', error) if isinstance(error, Mapping) else error}"
    result = observation.get("result", observation)
    result = result["data"] if isinstance(result, Mapping) and "data" in result else result
    return result if isinstance(result, str) else json.dumps(result, ensure_ascii=False)
