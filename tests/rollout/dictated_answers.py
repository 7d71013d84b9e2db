"""A recorder whose answers are dictated, without server or model."""

import asyncio
from collections.abc import Mapping, Sequence
from concurrent.futures import Future
from dataclasses import replace
from functools import cache
from typing import Any

from tree_rl.rollout.gateway.backend import Answer
from tree_rl.rollout.gateway.options import GatewayOptions
from tree_rl.rollout.gateway.protocols.exchange import ChatRequest, Choice, Completion
from tree_rl.rollout.gateway.protocols.messages import ChatMessage
from tree_rl.rollout.gateway.tokens.recorder import Recorder
from tree_rl.rollout.gateway.tokens.rendering import Renderer


def user(text: str) -> ChatMessage:
    return ChatMessage(role="user", content=text)


def said(text: str, reasoning: str | None = None) -> ChatMessage:
    return ChatMessage(role="assistant", content=text, reasoning=reasoning)


def without_reasoning(history: Sequence[ChatMessage]) -> list[ChatMessage]:
    return [replace(message, reasoning=None) for message in history]


def completed(message: ChatMessage, cause: Any = "stop") -> Completion:
    tokens = (("a", -0.5), ("\ufffd", -1.0))
    told = {"stop_cause": cause, "stop_sequence": None, "num_tokens": 2, "reasoning_tokens": 1, "tokens": tokens}
    return Completion(id="x", created=1, prompt_tokens=3, choices=(Choice(message=message, **told),))


def answered(answer: Any) -> Any:
    """What a task with this answer tells of it, without an event loop."""
    task: Future[Any] = Future()
    task.set_result(answer)
    return task


@cache
def renderer_of(tokenizer: Any, options: tuple[tuple[str, Any], ...]) -> Renderer:
    """Compiling a template takes a tenth of a second."""
    return Renderer(tokenizer, dict(options))


class Scene:
    """A recorder whose answers are dictated."""

    def __init__(
        self,
        tokenizer: Any,
        *,
        template_options: Mapping[str, Any] | None = None,
        tools: tuple[Mapping[str, Any], ...] = (),
        **options: Any,
    ) -> None:
        self.tokenizer = tokenizer
        self.tools = tools
        self.renderer = renderer_of(tokenizer, tuple((template_options or {}).items()))
        settings = GatewayOptions(max_context_tokens=4000, max_turn_tokens=400, **options)
        self.recorder = Recorder("s", renderer=self.renderer, options=settings)

    def prompt(self, *messages: ChatMessage, agent: str = "main") -> Any:
        request = ChatRequest(model="m", messages=messages, tools=self.tools, agent=agent)
        return asyncio.run(self.recorder.make_prompt(request))

    def answer(
        self,
        messages: Sequence[ChatMessage],
        turn: str | Sequence[int],
        *,
        stop: str | None = None,
        end: str | None = None,
        agent: str = "main",
    ) -> ChatMessage:
        """Record a turn. `end` is the token that ends it: the tokenizer's if None, a limit if empty."""
        ids = tuple(self.encode(turn) if isinstance(turn, str) else turn)
        text = self.tokenizer.decode(ids)
        text_ids: tuple[int, ...] | None = ids
        end_id = self.tokenizer.convert_tokens_to_ids(end or self.tokenizer.eos_token)
        if stop is not None:
            text = text[: text.index(stop)]
            text_ids = ids[: self.renderer.tokens_within(ids, text)]
            text_ids = text_ids if self.tokenizer.decode(text_ids) == text else None
        drawn = {"token_ids": ids if stop is not None or end == "" else (*ids, end_id), "log_probs": None}
        drawn |= {"finish_reason": "length" if end == "" else "stop", "min_version": None, "max_version": None}
        answer = Answer(**drawn, stop_text=stop, text=text, text_ids=text_ids)
        prompt = self.prompt(*messages, agent=agent)
        reading = asyncio.run(self.recorder.reading(prompt, answer))
        return self.recorder.record(prompt, answer, reading, seconds=(0.0, 0.0))

    def encode(self, text: str) -> list[int]:
        return self.tokenizer.encode(text, add_special_tokens=False)
