"""Tasks, tools and rewards of a taskset of Prime Intellect's `verifiers` (its `v1` interface).

Tools and rewards run in the trainer's process. Tasks that need verifiers' runtime are refused.
"""

import inspect
import json
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import verifiers.v1 as vf
from pydantic import TypeAdapter, ValidationError
from pydantic_core import ArgsKwargs
from verifiers.v1.graph import MessageNode
from verifiers.v1.utils.decorators import discover_decorated
from verifiers.v1.utils.loaders import load_taskset, taskset_config_type

from tree_rl.rollout.environments.environment import Outcome, ToolCall, tool

KEY = "environment_options"


@dataclass(frozen=True, kw_only=True, slots=True)
class VerifiersOptions:
    """Options of a taskset. Raises `ValueError` if it cannot be loaded; names the key."""

    taskset: str
    """Id of the taskset: a module that exports a `Taskset`, or one that verifiers includes."""
    config: Mapping[str, Any] = field(default_factory=dict)
    """Fields of the taskset's config."""

    def __post_init__(self) -> None:
        self.load()

    def load(self) -> Any:
        try:
            config = taskset_config_type(self.taskset).model_validate({"id": self.taskset, **self.config})
            return load_taskset(config)
        except (ImportError, AttributeError, TypeError, ValueError) as error:
            raise ValueError(f"{KEY}.taskset={self.taskset}: {type(error).__name__}: {error}") from error


class VerifiersEnvironment:
    """One task of a taskset, at position `extra_info.idx`. The reward is the weighted sum of the task's rewards."""

    def __init__(self, options: VerifiersOptions) -> None:
        self.options = options
        self._task: Any = None
        self._trace: Any = None
        self._tools: dict[str, _Tool] = {}
        self._calls = 0
        self._is_stopped = False

    async def reset(self, task: Mapping[str, Any]) -> None:
        """Load the task and set up its tools. Raises `ValueError` if there is no such task or it needs a runtime."""
        position = task.get("idx")
        if not isinstance(position, int):
            raise ValueError(f"extra_info.idx: expected the position of a task in the taskset, received {position!r}")
        taskset = self.options.load()
        self._task = next(iter(taskset.include(idx=[position])), None)
        if self._task is None:
            raise ValueError(f"extra_info.idx={position}: {self.options.taskset} has no such task")
        _refuse_runtimes(self._task)
        toolsets = [*type(taskset).toolsets(taskset.config), *type(self._task).toolsets(self._task.config)]
        self._trace = vf.Trace[type(self._task.data), vf.State, vf.AgentConfig](
            task=vf.TraceTask(type=type(self._task).__name__, data=self._task.data, key=self._task.key),
            agent=vf.AgentInfo(config=vf.AgentConfig()),
        )
        for toolset in toolsets:
            await toolset.setup()
            await toolset.setup_task(self._task.data)
            for function in discover_decorated(toolset, "tool"):
                made = _Tool.of(toolset.server_name, function)
                self._tools[made.name] = made
        prompt = self._task.data.prompt
        messages = [vf.UserMessage(content=prompt)] if isinstance(prompt, str) else prompt or []
        if self._task.data.system_prompt:
            messages = [vf.SystemMessage(content=self._task.data.system_prompt), *messages]
        for message in messages:
            self._add(message)

    def tools(self) -> Sequence[Mapping[str, Any]]:
        return [one.described for one in self._tools.values()]

    async def call(self, call: ToolCall) -> str:
        """Run a tool. The agent sees its exceptions."""
        called = self._tools.get(call.name)
        if self._is_stopped:
            return "error: the session has ended"
        if called is None:
            return f"error: unknown tool {call.name!r}; the tools are {', '.join(self._tools) or 'none'}"
        answer = await called.run(call.arguments)
        self._calls += 1
        made = vf.ToolCall(id=f"call_{self._calls}", name=call.name, arguments=json.dumps(dict(call.arguments)))
        self._add(vf.AssistantMessage(tool_calls=[made]), sampled=True)
        self._add(vf.ToolMessage(tool_call_id=made.id, content=answer, name=call.name))
        return answer

    async def stop(self) -> None:
        self._is_stopped = True

    async def score(self, outcome: Outcome) -> float:
        """Let the task score the calls and the answer. Raises `ValueError` if its reward is not finite."""
        self._add(vf.AssistantMessage(content=outcome.answer), sampled=True)
        self._trace.is_completed = self._trace.ok = True
        self._trace.stop_condition = "agent_completed" if outcome.is_complete else "max_turns"
        await self._task.score(self._trace)
        reward = float(self._trace.reward)
        if not math.isfinite(reward):
            raise ValueError(f"{self.options.taskset}: expected a finite reward, received {reward}")
        return reward

    async def close(self) -> None:
        """Nothing to release."""

    def _add(self, message: Any, *, sampled: bool = False) -> None:
        nodes = self._trace.nodes
        nodes.append(MessageNode(parent=len(nodes) - 1 if nodes else None, message=message, sampled=sampled))


@dataclass(frozen=True, kw_only=True, slots=True)
class _Tool:
    name: str
    described: Mapping[str, Any]
    arguments: TypeAdapter[Any]

    @classmethod
    def of(cls, server: str, function: Callable[..., Any]) -> "_Tool":
        """A method of a toolset, under the name that verifiers' harnesses see."""
        own = getattr(function, "tool_name", None) or function.__name__
        name = f"{server}_{own}" if server else own
        arguments: TypeAdapter[Any] = TypeAdapter(function)  # type: ignore[arg-type] # pydantic takes functions too
        described = tool(name, inspect.getdoc(function) or "", arguments.json_schema())
        return cls(name=name, described=described, arguments=arguments)

    async def run(self, given: Mapping[str, Any]) -> str:
        try:
            result = self.arguments.validate_python(ArgsKwargs((), dict(given)))
            result = await result if inspect.isawaitable(result) else result
        except ValidationError as error:
            return f"error: {error}"
        except Exception as error:  # noqa: BLE001
            # As in verifiers' tool servers, a tool's error is its answer.
            return f"error: {type(error).__name__}: {error}"
        return result if isinstance(result, str) else json.dumps(result, ensure_ascii=False, default=str)


def _refuse_runtimes(task: Any) -> None:
    """Raise `ValueError` if parts of a task need verifiers' runtime; skipping a reward would count as 0."""
    hooks = [*task.hooks("reward"), *(judge.score for judge in task.plugged_judges())]
    needing = [
        *(["a container"] if task.NEEDS_CONTAINER or task.data.image else []),
        *(name for name in ("setup", "finalize") if getattr(type(task), name) is not getattr(vf.Task, name)),
        *(
            hook.__name__
            for hook in hooks
            if (taken := inspect.signature(hook).parameters.get("runtime")) and taken.default is inspect.Parameter.empty
        ),
    ]
    if needing:
        raise ValueError(
            f"{KEY}.taskset: {type(task).__name__} needs verifiers' own runtime ({', '.join(needing)}), which "
            "environment=verifiers does not start; play it with environment=swe or a class of your own"
        )
