"""One agent session: the model acts on an environment turn by turn, and its calls are recorded for `rows_of_calls`.

Branches arise in two ways: earlier reasoning is stripped from the next prompt, and the results of parallel tool calls
are followed up in sub-contexts of their own, whose conclusions the main line then reads.
"""

import asyncio
from collections.abc import Awaitable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, Protocol

from tree_rl.rollout.chat import Chat
from tree_rl.rollout.environment import Environment, Outcome, ToolCall
from tree_rl.rollout.tool_calls import Turn, parse_turn
from tree_rl.rollout.transcript import ModelCall

ParallelTools = Literal["single", "in_turn", "branches"]
MALFORMED = 'error: malformed tool call; expected <tool_call>{"name": ..., "arguments": {...}}</tool_call>'


@dataclass(frozen=True, kw_only=True, slots=True)
class SessionOptions:
    """How a session runs.

    Raises:
        ValueError: a value is out of range; the message names it.
    """

    strip_reasoning: bool = True
    """Remove the reasoning of earlier turns from the next prompt: every turn with reasoning is a branch."""
    parallel_tools: ParallelTools = "in_turn"
    """Several calls in a turn: `single` runs the first only; `in_turn` runs all and appends all results; `branches`
    follows each result up in its own context, and the main line reads the conclusions."""
    max_turns: int = 8
    """Assistant turns of the main line."""
    max_branch_turns: int = 1
    """Assistant turns of each parallel branch."""
    max_parallel_calls: int = 4
    """Calls of one turn that are run."""
    max_prompt_tokens: int = 2048
    """A longer first prompt fails the session."""
    max_response_tokens: int = 4096
    """Tokens behind the first prompt, of any row."""
    max_turn_tokens: int = 1024
    """Tokens generated in one turn."""
    max_result_tokens: int = 512
    """Longer tool results are cut in the middle."""

    def __post_init__(self) -> None:
        if self.parallel_tools not in ("single", "in_turn", "branches"):
            raise ValueError(f"parallel_tools={self.parallel_tools!r}: expected single, in_turn or branches")
        for name in self.__slots__:
            value = getattr(self, name)
            if name.startswith("max_") and value < 1:
                raise ValueError(f"{name}={value}: expected at least 1")


class Generate(Protocol):
    """The model: token ids in, token ids out."""

    def __call__(self, prompt_ids: list[int], *, max_tokens: int) -> Awaitable[tuple[list[int], list[float] | None]]:
        """Return generated ids and their log-probs."""


@dataclass(frozen=True, kw_only=True, slots=True)
class SessionRecord:
    """A finished session."""

    calls: tuple[ModelCall, ...]
    """In the order they were answered."""
    reward: float
    outcome: Outcome
    tool_calls: int
    """Tools executed."""


@dataclass(kw_only=True, slots=True)
class _Session:
    chat: Chat
    environment: Environment
    generate: Generate
    options: SessionOptions
    max_context_tokens: int
    calls: list[ModelCall] = field(default_factory=list)
    tool_calls: int = 0
    malformed_calls: int = 0

    async def converse(self, context: list[int], turns: int, parallel: ParallelTools) -> tuple[str, int, bool]:
        """Let the model act until it answers without a tool call, or a limit is reached.

        Returns:
            The last turn's text, the number of turns, and whether the agent ended by itself.
        """
        text = ""
        for turn_number in range(1, turns + 1):
            room = self.max_context_tokens - len(context)
            if room < 1:
                return text, turn_number - 1, False
            response = await self._ask(context, min(room, self.options.max_turn_tokens))
            turn = parse_turn(self.chat.text(response))
            text = turn.text
            if not self.chat.is_finished(response):
                return text, turn_number, False
            if not turn.calls:
                return text, turn_number, True
            results = await self._results(context + response, turn, parallel)
            context = self._next_context(context, response) + self.chat.observation_ids(results)
        return text, turns, False

    async def _ask(self, context: list[int], max_tokens: int) -> list[int]:
        response, log_probs = await self.generate(list(context), max_tokens=max_tokens)
        recorded = None if log_probs is None else tuple(log_probs)
        self.calls.append(ModelCall(prompt_ids=tuple(context), response_ids=tuple(response), log_probs=recorded))
        return list(response)

    def _next_context(self, context: list[int], response: list[int]) -> list[int]:
        if not self.options.strip_reasoning:
            return context + response
        stripped = self.chat.without_reasoning(response)
        if stripped == response:
            return context + response
        return self.chat.without_open_reasoning(context) + stripped

    async def _results(self, context: list[int], turn: Turn, parallel: ParallelTools) -> Sequence[str]:
        most = 1 if parallel == "single" else self.options.max_parallel_calls
        results = await asyncio.gather(*[self._execute(call) for call in turn.calls[:most]])
        if parallel != "branches" or len(results) < 2:
            return results
        return await asyncio.gather(*[self._follow_up(context, result) for result in results])

    async def _follow_up(self, context: list[int], result: str) -> str:
        branch = context + self.chat.observation_ids([result])
        conclusion, _, _ = await self.converse(branch, self.options.max_branch_turns, "in_turn")
        return self.chat.cut(conclusion, self.options.max_result_tokens) or result

    async def _execute(self, call: ToolCall | None) -> str:
        if call is None:
            self.malformed_calls += 1
            return MALFORMED
        self.tool_calls += 1
        return self.chat.cut(await self.environment.call(call), self.options.max_result_tokens)


async def run_session(
    *,
    messages: Sequence[Mapping[str, Any]],
    task: Mapping[str, Any],
    chat: Chat,
    environment: Environment,
    generate: Generate,
    options: SessionOptions,
) -> SessionRecord:
    """Run a session from its first message to its reward.

    Args:
        messages: the conversation's start.
        task: given to the environment.
        chat: renders tokens.
        environment: fresh; closed at the end.
        generate: the model.
        options: limits and branching.

    Raises:
        ValueError: the first prompt is too long.
    """
    try:
        await environment.reset(task)
        context = chat.prompt_ids(messages, environment.tools())
        if len(context) > options.max_prompt_tokens:
            raise ValueError(
                f"first prompt of {len(context)} tokens: expected at most max_prompt_tokens="
                f"{options.max_prompt_tokens}; raise data.max_prompt_length or shorten the task and its tools"
            )
        session = _Session(
            chat=chat,
            environment=environment,
            generate=generate,
            options=options,
            max_context_tokens=len(context) + options.max_response_tokens,
        )
        answer, turns, is_complete = await session.converse(context, options.max_turns, options.parallel_tools)
        outcome = Outcome(answer=answer, turns=turns, malformed_calls=session.malformed_calls, is_complete=is_complete)
        reward = await environment.score(outcome)
    finally:
        await environment.close()
    return SessionRecord(calls=tuple(session.calls), reward=reward, outcome=outcome, tool_calls=session.tool_calls)
