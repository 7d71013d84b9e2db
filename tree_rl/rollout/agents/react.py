"""The native agent: reason, act, observe, over the OpenAI API, with switches for what makes a conversation branch.

* parallel_tools: all calls of a turn run at once, or the first one only.
* sub_agents: a tool `delegate` gives a task to a fresh conversation, whose conclusion the main line reads.
* compact_after_tokens: a long conversation is replaced by its task and the model's own summary.
* think: `keep` sends reasoning back as it came; `strip` cuts it out of the history.
"""

import asyncio
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

import openai

from tree_rl.rollout.agents.agent import AgentError
from tree_rl.rollout.environment import Environment, Outcome, ToolCall
from tree_rl.rollout.gateway.endpoint import Endpoint
from tree_rl.rollout.gateway.tokens.reasoning import REASONING

Think = Literal["keep", "strip"]
TOOL_CALL = "<tool_call>"
MALFORMED = "error: malformed tool call; its arguments are no JSON object"
SUMMARISE = (
    "Your context is nearly full. Write down, for yourself, what you have found and done and what is left to do."
)
GO_ON = "What you have found and done so far:\n\n{summary}\n\nGo on from here."
SUB_AGENT = "You work on one part of a larger task. Do it, then answer with your result in a few sentences."
DELEGATE: Mapping[str, Any] = {
    "type": "function",
    "function": {
        "name": "delegate",
        "description": "Give a part of the work to an assistant with the same tools; returns its conclusion.",
        "parameters": {
            "type": "object",
            "properties": {"task": {"type": "string", "description": "What it should find out or do."}},
            "required": ["task"],
        },
    },
}


@dataclass(frozen=True, kw_only=True, slots=True)
class ReActOptions:
    """How the agent works.

    Raises:
        ValueError: a value is out of range; the message names it.
    """

    max_turns: int = 20
    """Model calls of the main line."""
    parallel_tools: bool = True
    """Run all calls of a turn, concurrently; otherwise the first one only."""
    sub_agents: bool = False
    """Offer `delegate`."""
    max_sub_turns: int = 5
    """Model calls of one sub-agent."""
    compact_after_tokens: int | None = None
    """Prompt and answer beyond which the conversation is summarised; None never does."""
    think: Think = "keep"
    """`strip` needs the gateway's `reasoning=inline`."""
    max_result_characters: int = 6000
    """Longer tool results lose their middle."""
    max_retries: int = 4
    """Of a request that the model server refused for the moment."""

    def __post_init__(self) -> None:
        if self.think not in ("keep", "strip"):
            raise ValueError(f"think={self.think!r}: expected keep or strip")
        for name in ("max_turns", "max_sub_turns", "max_result_characters"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name}={getattr(self, name)}: expected at least 1")


@dataclass(kw_only=True, slots=True)
class _Conversation:
    """Messages of the main line or of one sub-agent."""

    client: openai.AsyncOpenAI
    tools: list[Mapping[str, Any]]
    start: list[dict[str, Any]]
    messages: list[dict[str, Any]] = field(default_factory=list)


class ReActAgent:
    """See the module. One per session.

    Args:
        options: switches and limits.
    """

    def __init__(self, options: ReActOptions | None = None) -> None:
        self.options = options or ReActOptions()
        self._malformed = 0
        self._sub_agents = 0

    async def run(
        self, messages: Sequence[Mapping[str, Any]], *, environment: Environment, endpoint: Endpoint
    ) -> Outcome:
        """Work on the task."""
        tools = [*environment.tools(), *([DELEGATE] if self.options.sub_agents else [])]
        start = [dict(message) for message in messages]
        answer, turns, is_complete = await self._converse(start, tools, environment, endpoint, self.options.max_turns)
        return Outcome(answer=answer, turns=turns, malformed_calls=self._malformed, is_complete=is_complete)

    async def _converse(
        self,
        start: list[dict[str, Any]],
        tools: list[Mapping[str, Any]],
        environment: Environment,
        endpoint: Endpoint,
        max_turns: int,
    ) -> tuple[str, int, bool]:
        """Turn by turn until an answer without a tool call, or a limit.

        Returns:
            The last turn's text, the number of turns, and whether the agent ended by itself.
        """
        text = ""
        client = openai.AsyncOpenAI(
            base_url=endpoint.openai_url, api_key=endpoint.token, max_retries=self.options.max_retries
        )
        async with client:
            talk = _Conversation(client=client, tools=tools, start=start, messages=list(start))
            for turn in range(1, max_turns + 1):
                answer = await self._ask(talk, endpoint.model)
                if answer is None:
                    return text, turn - 1, False
                choice, num_tokens = answer
                message = choice.message
                text = REASONING.sub("", message.content or "").strip()
                calls = list(message.tool_calls or ())
                if choice.finish_reason == "length":
                    return text, turn, False
                if not calls and TOOL_CALL not in text:
                    return text, turn, True
                kept = calls if self.options.parallel_tools else calls[:1]
                talk.messages.append(self._sent_back(message, kept))
                results = await asyncio.gather(*[self._execute(call, environment, endpoint) for call in kept])
                if not calls:
                    # The server leaves a call that it cannot read in the text.
                    self._malformed += 1
                    talk.messages.append({"role": "user", "content": MALFORMED})
                talk.messages += [
                    {"role": "tool", "tool_call_id": call.id, "content": result}
                    for call, result in zip(kept, results, strict=True)
                ]
                limit = self.options.compact_after_tokens
                if limit is not None and num_tokens > limit and turn < max_turns:
                    await self._compact(talk, endpoint.model)
        return text, max_turns, False

    async def _ask(self, talk: _Conversation, model: str) -> tuple[Any, int] | None:
        """The answer's choice and the tokens of prompt and answer; None where the session's limits end it."""
        tools: dict[str, Any] = {"tools": talk.tools} if talk.tools else {}
        try:
            answer = await talk.client.chat.completions.create(model=model, messages=talk.messages, **tools)  # type: ignore[arg-type]
        except openai.APIStatusError as error:
            if error.code in ("context_length_exceeded", "session_exhausted"):
                return None
            raise AgentError(f"the model could not be asked: {error.message}") from error
        except openai.APIConnectionError as error:
            raise AgentError(f"the model could not be reached: {error}") from error
        return answer.choices[0], answer.usage.total_tokens if answer.usage else 0

    def _sent_back(self, message: Any, calls: Sequence[Any]) -> dict[str, Any]:
        """An assistant turn as it stands in the history."""
        sent: dict[str, Any] = message.model_dump(exclude_none=True)
        if calls:
            sent["tool_calls"] = [call.model_dump(exclude_none=True) for call in calls]
        if self.options.think == "strip":
            if sent.get("reasoning_content"):
                raise AgentError("think=strip: the gateway keeps reasoning apart; set its option reasoning=inline")
            sent["content"] = REASONING.sub("", sent.get("content") or "")
        return sent

    async def _execute(self, call: Any, environment: Environment, endpoint: Endpoint) -> str:
        try:
            arguments = json.loads(call.function.arguments or "{}")
        except json.JSONDecodeError:
            arguments = None
        if not isinstance(arguments, dict):
            self._malformed += 1
            return MALFORMED
        if self.options.sub_agents and call.function.name == "delegate":
            return await self._delegate(str(arguments.get("task", "")), environment, endpoint)
        return self._cut(await environment.call(ToolCall(name=call.function.name, arguments=arguments)))

    async def _delegate(self, task: str, environment: Environment, endpoint: Endpoint) -> str:
        self._sub_agents += 1
        start = [{"role": "system", "content": SUB_AGENT}, {"role": "user", "content": task}]
        named = endpoint.named(f"sub-{self._sub_agents}")
        tools = list(environment.tools())
        text, _, _ = await self._converse(start, tools, environment, named, self.options.max_sub_turns)
        return self._cut(text) or "the assistant came to no conclusion"

    async def _compact(self, talk: _Conversation, model: str) -> None:
        talk.messages.append({"role": "user", "content": SUMMARISE})
        # The tools stay in the request: without them the prompt would begin differently and share nothing.
        answer = await self._ask(talk, model)
        summary = "" if answer is None else REASONING.sub("", answer[0].message.content or "").strip()
        talk.messages = [*talk.start, {"role": "user", "content": GO_ON.format(summary=summary)}]

    def _cut(self, text: str) -> str:
        most = self.options.max_result_characters
        return text if len(text) <= most else f"{text[: most // 2]}\n[...]\n{text[-most // 2 :]}"
