"""The native ReAct agent, over the OpenAI API. Its options decide where conversations branch."""

import asyncio
import ssl
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache
from typing import Any, Literal

import httpx
import openai
from openai.types.chat import ChatCompletion

from tree_rl.option_types import check_fields
from tree_rl.rollout.agents.task_agent import CLIENT_TIMEOUT_S, AgentError
from tree_rl.rollout.environments.environment import Environment, Outcome, ToolCall, text_tool
from tree_rl.rollout.gateway.dialects.dialect import THINK_END, THINK_START
from tree_rl.rollout.gateway.endpoint import Endpoint
from tree_rl.rollout.gateway.protocols.plain_json import JsonError, decode_json

Think = Literal["keep", "strip"]
ParallelTools = bool | Literal["branches"]
TOOL_CALL = "<tool_call>"
MALFORMED = "error: malformed tool call; its arguments are no JSON object"
MAX_SUB_AGENT_TURNS = 5
MAX_RESULT_CHARACTERS = 6000
"""Longest tool result; a longer one loses its middle."""
SUMMARISE = (
    "Your context is nearly full. Write down, for yourself, what you have found and done and what is left to do."
)
MAX_RETRIES = 4
"""Number of retries of a request that the model server refused temporarily."""
GO_ON = "What you have found and done so far:\n\n{summary}\n\nGo on from here."
SUB_AGENT = "You work on one part of a larger task. Do it, then answer with your result in a few sentences."
DELEGATE = text_tool(
    "delegate",
    "Give a part of the work to an assistant with the same tools; returns its conclusion.",
    "task",
    "What it should find out or do.",
)


@dataclass(frozen=True, kw_only=True, slots=True)
class ReActOptions:
    """Options of the agent. Raises `ValueError` if a value is out of range; the message names it."""

    max_turns: int = 20
    """Limit of model calls on the main line."""
    parallel_tools: ParallelTools = True
    """Treatment of several calls in a turn. true: run all in parallel. false: run the first; the history keeps only
    that call. branches: run all; the model answers each result in a sub-branch; the main line reads these answers."""
    sub_agents: bool = False
    """True offers the tool `delegate`: a new conversation works on a task, and the main line reads its conclusion."""
    compact_after_tokens: int | None = None
    """Tokens of prompt and answer beyond which task and summary replace the conversation; None: never."""
    think: Think = "keep"
    """`keep` leaves reasoning in the history; `strip` removes it, and needs the gateway's `reasoning=inline`."""

    def __post_init__(self) -> None:
        check_fields(self)
        for name in ("max_turns", "compact_after_tokens"):
            value = getattr(self, name)
            if value is not None and value < 1:
                raise ValueError(f"{name}={value}: expected at least 1")


@dataclass(kw_only=True, slots=True)
class _Conversation:
    """The main line, a sub-agent, or a sub-branch that answers one result."""

    client: openai.AsyncOpenAI
    environment: Environment
    tools: Sequence[Mapping[str, Any]]
    start: list[dict[str, Any]]
    messages: list[dict[str, Any]]
    parallel_tools: ParallelTools


class ReActAgent:
    """The agent of this module, one per session."""

    def __init__(self, options: ReActOptions | None = None) -> None:
        self.options = options or ReActOptions()
        self._endpoint: Endpoint | None = None
        self._malformed = 0
        self._sub_agents = 0

    async def run(
        self, messages: Sequence[Mapping[str, Any]], *, environment: Environment, endpoint: Endpoint
    ) -> Outcome:
        start = [dict(message) for message in messages]
        self._endpoint = endpoint
        async with openai.AsyncOpenAI(
            base_url=endpoint.openai_url,
            api_key=endpoint.token,
            max_retries=MAX_RETRIES,
            timeout=CLIENT_TIMEOUT_S,
            http_client=openai.DefaultAsyncHttpxClient(verify=_tls()),
        ) as client:
            talk = _Conversation(
                client=client,
                environment=environment,
                tools=[*environment.tools(), *([DELEGATE] if self.options.sub_agents else [])],
                start=start,
                messages=list(start),
                parallel_tools=self.options.parallel_tools,
            )
            answer, turns, is_complete = await self._converse(talk, self.options.max_turns)
        return Outcome(answer=answer, turns=turns, malformed_calls=self._malformed, is_complete=is_complete)

    async def _converse(self, talk: _Conversation, max_turns: int) -> tuple[str, int, bool]:
        """Let the model act until it answers without a tool call, or a limit is reached.

        Returns:
            The last turn's text, the number of turns, and whether the model ended by itself.
        """
        text = ""
        for turn in range(1, max_turns + 1):
            answer = await self._ask(talk)
            if answer is None:
                return text, turn - 1, False
            choice, num_tokens = answer
            text = _without_reasoning(choice.message.content)
            calls = list(choice.message.tool_calls or ())
            if choice.finish_reason == "length":
                return text, turn, False
            if not calls and TOOL_CALL not in text:
                return text, turn, True
            if calls:
                await self._act(talk, choice.message, calls if talk.parallel_tools else calls[:1])
            else:
                # The gateway leaves a call that it cannot read in the text.
                self._malformed += 1
                talk.messages += [self._history(choice.message, ()), {"role": "user", "content": MALFORMED}]
            limit = self.options.compact_after_tokens
            if limit is not None and num_tokens > limit and turn < max_turns:
                await self._compact(talk)
        return text, max_turns, False

    async def _ask(self, talk: _Conversation) -> tuple[Any, int] | None:
        """The answer's choice and the number of tokens of prompt and answer; None if the session's limits end it."""
        assert self._endpoint is not None
        body = {
            "model": self._endpoint.model,
            "messages": talk.messages,
            **({"tools": talk.tools} if talk.tools else {}),
        }
        try:
            # `post` sends the body as it is. `chat.completions.create` transforms it, a third of the call's time.
            answer = await talk.client.post("/chat/completions", cast_to=ChatCompletion, body=body)
        except openai.APIStatusError as error:
            if error.code in ("context_length_exceeded", "session_exhausted", "session_over"):
                return None
            raise AgentError(f"the model could not be asked: {error.message}") from error
        except openai.APIConnectionError as error:
            raise AgentError(f"the model could not be reached: {error}") from error
        return answer.choices[0], answer.usage.total_tokens if answer.usage else 0

    async def _act(self, talk: _Conversation, message: Any, calls: Sequence[Any]) -> None:
        """Run the calls of a turn, and append the turn and the results."""
        results = await asyncio.gather(*[self._execute(talk, call) for call in calls])
        if talk.parallel_tools == "branches" and len(calls) > 1:
            answers = [self._answer(talk, message, call, text) for call, text in zip(calls, results, strict=True)]
            results = await asyncio.gather(*answers)
        talk.messages.append(self._history(message, calls))
        talk.messages += [_tool_message(call, result) for call, result in zip(calls, results, strict=True)]

    def _history(self, message: Any, calls: Sequence[Any]) -> dict[str, Any]:
        sent: dict[str, Any] = message.model_dump(exclude_none=True)
        if calls:
            sent["tool_calls"] = [call.model_dump(exclude_none=True) for call in calls]
        if self.options.think == "strip":
            if sent.get("reasoning_content"):
                raise AgentError("think=strip: the gateway keeps reasoning apart; set its option reasoning=inline")
            sent["content"] = _stripped(sent.get("content") or "")
        return sent

    async def _execute(self, talk: _Conversation, call: Any) -> str:
        try:
            arguments = decode_json(call.function.arguments or "{}")
        except JsonError:
            arguments = None
        if not isinstance(arguments, dict):
            self._malformed += 1
            return MALFORMED
        if self.options.sub_agents and call.function.name == "delegate":
            return await self._delegate(talk, str(arguments.get("task", "")))
        return _cut(await talk.environment.call(ToolCall(name=call.function.name, arguments=arguments)))

    async def _answer(self, talk: _Conversation, message: Any, call: Any, result: str) -> str:
        """Let the model answer one result in a separate branch of one turn, which still contains its reasoning."""
        so_far = [*talk.messages, message.model_dump(exclude_none=True), _tool_message(call, result)]
        text, _, _ = await self._converse(replace(talk, messages=so_far, parallel_tools=True), 1)
        return _cut(text) or result

    async def _delegate(self, talk: _Conversation, task: str) -> str:
        assert self._endpoint is not None
        self._sub_agents += 1
        start = [{"role": "system", "content": SUB_AGENT}, {"role": "user", "content": task}]
        sub_agent = replace(
            talk,
            client=talk.client.copy(base_url=self._endpoint.named(f"sub-{self._sub_agents}").openai_url),
            tools=list(talk.environment.tools()),
            start=start,
            messages=list(start),
        )
        text, _, _ = await self._converse(sub_agent, MAX_SUB_AGENT_TURNS)
        return _cut(text) or "the assistant came to no conclusion"

    async def _compact(self, talk: _Conversation) -> None:
        talk.messages.append({"role": "user", "content": SUMMARISE})
        # The tools stay in the request: without them the prompt would have another start and share no prefix.
        answer = await self._ask(talk)
        summary = "" if answer is None else _without_reasoning(answer[0].message.content)
        talk.messages = [*talk.start, {"role": "user", "content": GO_ON.format(summary=summary)}]


def _tool_message(call: Any, result: str) -> dict[str, Any]:
    return {"role": "tool", "tool_call_id": call.id, "content": result}


def _stripped(turn: str) -> str:
    """Remove the reasoning at the start of a turn, with its tags and the white space around it."""
    _, closed, visible = turn.partition(THINK_END)
    return visible.lstrip() if closed else turn


def _without_reasoning(content: str | None) -> str:
    """The visible text of a turn; empty if its reasoning never ended."""
    said = _stripped(content or "").strip()
    return "" if said.startswith(THINK_START) else said


def _cut(text: str) -> str:
    half = MAX_RESULT_CHARACTERS // 2
    return text if len(text) <= MAX_RESULT_CHARACTERS else f"{text[:half]}\n[...]\n{text[-half:]}"


@cache
def _tls() -> ssl.SSLContext:
    """One context for all sessions, because reading the system's certificates takes 50 ms."""
    return httpx.create_ssl_context()
