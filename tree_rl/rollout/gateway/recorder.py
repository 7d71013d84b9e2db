"""The memory of a session: prompts made of recorded tokens, and calls recorded behind them."""

import asyncio
from collections.abc import Callable
from dataclasses import dataclass
from typing import TypeVar

from tree_rl.rollout.chat import THINK_START
from tree_rl.rollout.gateway.context_trie import ContextTrie, GeneratedTurn, Node
from tree_rl.rollout.gateway.drift import DriftReport, ReturnedTurn, find_drifted_siblings, first_difference
from tree_rl.rollout.gateway.exchange import ChatRequest
from tree_rl.rollout.gateway.fields import RequestError
from tree_rl.rollout.gateway.generation import Answer
from tree_rl.rollout.gateway.messages import ChatMessage, history_keys
from tree_rl.rollout.gateway.options import GatewayOptions
from tree_rl.rollout.gateway.rendering import Renderer
from tree_rl.rollout.gateway.turns import read_message
from tree_rl.rollout.transcript import ModelCall

LARGE_TEXT = 200_000
"""Characters beyond which rendering and tokenizing leave the event loop to others."""

Made = TypeVar("Made")


@dataclass(frozen=True, kw_only=True, slots=True)
class Prompt:
    """What the model is given for a request."""

    request: ChatRequest
    messages: tuple[ChatMessage, ...]
    """With the reasoning that clients drop."""
    text: str
    """As the template writes it."""
    ids: tuple[int, ...]
    node: Node


class Recorder:
    """Makes prompts and records answers.

    Args:
        session: its id.
        renderer: of the model's tokenizer.
        options: of the gateway.
    """

    def __init__(self, session: str, *, renderer: Renderer, options: GatewayOptions) -> None:
        self.calls: list[ModelCall] = []
        self._session = session
        self._renderer = renderer
        self._options = options
        self._trie = ContextTrie(renderer)
        self._answered: dict[bytes, list[ChatMessage]] = {}
        self._pieces: dict[str, tuple[int, ...]] = {}
        self._returned: dict[int, ReturnedTurn | None] = {}

    def drift_report(self) -> DriftReport:
        """What drift there was so far."""
        siblings = find_drifted_siblings(self._session, self.calls, self._renderer.decode)
        return DriftReport(returned=tuple(turn for turn in self._returned.values() if turn), siblings=siblings)

    async def prompt(self, request: ChatRequest) -> Prompt:
        """Make the prompt of a request.

        Args:
            request: what is asked.

        Raises:
            RequestError: the template refuses the messages, or the prompt leaves no room for an answer.
        """
        messages = self._with_reasoning(request.messages)
        text = await self._unblocked(
            sum(len(message.content) for message in messages),
            lambda: self._renderer.render(messages, tools=request.tools, is_prompt=True),
        )
        match = self._trie.match(text)
        pieces = self._renderer.pieces(match.rest)
        encoded = await self._unblocked(len(match.rest), lambda: self._renderer.encode(pieces))
        known = match.node.depth + (len(match.cut[1]) if match.cut else 0)
        self._check_length(known + sum(len(ids) for ids in encoded))
        node = self._trie.extend(match, pieces, encoded)
        ids = tuple(node.path_ids() if self._options.on_drift == "reuse" else await self._spelled_anew(text))
        self._check_length(len(ids))
        self._note_returned(node, text)
        return Prompt(request=request, messages=messages, text=text, ids=ids, node=node)

    def record(self, prompt: Prompt, answer: Answer, *, agent: str) -> ChatMessage:
        """Record an answer.

        Args:
            prompt: what was given.
            answer: what was generated.
            agent: who asked.

        Returns:
            The message for the agent.
        """
        index = len(self.calls)
        self.calls.append(
            ModelCall(
                prompt_ids=prompt.ids,
                response_ids=answer.token_ids,
                log_probs=answer.log_probs,
                turn=sum(message.role == "assistant" for message in prompt.messages),
                agent=agent,
                min_version=answer.min_version,
                max_version=answer.max_version,
            )
        )
        message = read_message(
            answer.text,
            parse_tools=bool(prompt.request.tools),
            is_reasoning_open=prompt.text.rstrip().endswith(THINK_START),
            reasoning=self._options.reasoning,
            key=f"{self._session}_{index}",
        )
        text, closing = self._in_template(prompt, message, answer.text)
        turn = GeneratedTurn(call=index, raw_text=answer.text, response_ids=answer.token_ids, closing=closing)
        whole = answer.text_ids is not None
        self._trie.add_turn(prompt.node, text=text if whole else None, ids=answer.text_ids or (), turn=turn)
        key = history_keys([*prompt.messages, message])[-1]
        self._answered.setdefault(key, []).append(message)
        return message

    def _in_template(self, prompt: Prompt, message: ChatMessage, raw_text: str) -> tuple[str, str]:
        """A turn as the template writes it at the end of a conversation, and what closes it there."""
        try:
            whole = self._renderer.render([*prompt.messages, message], tools=prompt.request.tools, is_prompt=False)
        except RequestError:
            return raw_text, self._renderer.end_text
        if not whole.startswith(prompt.text):
            return raw_text, self._renderer.end_text
        written = whole[len(prompt.text) :]
        text, closing, _ = written.rpartition(self._renderer.end_text)
        return (text, closing) if closing else (written, "")

    def _with_reasoning(self, messages: tuple[ChatMessage, ...]) -> tuple[ChatMessage, ...]:
        """Put back what the session's own turns have lost on their way through the client: the reasoning field."""
        if not self._answered:
            return messages
        restored = []
        for key, message in zip(history_keys(messages), messages, strict=True):
            candidates = self._answered.get(key, []) if message.role == "assistant" else []
            alike = [own for own in candidates if message.reasoning in (None, "", own.reasoning)]
            restored.append(alike[-1] if alike else message)
        return tuple(restored)

    def _note_returned(self, node: Node, text: str) -> None:
        """Report the turns that a prompt brings back for the first time and that would have drifted."""
        position = 0
        for part in node.path():
            written = self._trie.form_in(part, text, position)
            position += len(written)
            if part.turn is None or part.turn.call in self._returned:
                continue
            again = [token for ids in self._renderer.encode(self._renderer.pieces(written)) for token in ids]
            different = first_difference(part.ids, again, self._renderer.decode)
            self._returned[part.turn.call] = (
                None
                if different is None
                else ReturnedTurn(
                    session=self._session,
                    call=part.turn.call,
                    position=len(self.calls[part.turn.call].prompt_ids) + different[0],
                    text=different[1],
                    kind="retokenized" if written == part.turn.raw_text else "rewritten",
                    was_reused=self._options.on_drift == "reuse",
                )
            )

    async def _spelled_anew(self, text: str) -> list[int]:
        pieces = self._renderer.pieces(text)
        new = [piece for piece in dict.fromkeys(pieces) if piece not in self._pieces]
        encoded = await self._unblocked(sum(map(len, new)), lambda: self._renderer.encode(new))
        self._pieces.update(zip(new, encoded, strict=True))
        return [token for piece in pieces for token in self._pieces[piece]]

    async def _unblocked(self, characters: int, work: Callable[[], Made]) -> Made:
        return work() if characters < LARGE_TEXT else await asyncio.to_thread(work)

    def _check_length(self, num_tokens: int) -> None:
        limit = self._options.max_context_tokens
        if num_tokens >= limit:
            raise RequestError(
                f"prompt is too long: {num_tokens} tokens > {limit - 1} maximum (this model's maximum context length "
                f"is {limit} tokens, the answer included)",
                code="context_length_exceeded",
            )
