"""Finds the assistant's turns in a rendered conversation."""

from typing import Any

from tree_rl.inspection.chat_tokenizer import ChatTokenizer
from tree_rl.inspection.messages.conversation import Chat
from tree_rl.inspection.messages.template_form import REFUSALS
from tree_rl.rollout.gateway.tokens.call_format import shared_length

PROBES = ("a0", "z9")
"""Two texts that share neither their first nor their last character."""


class Turns:
    """Spans of turns in `whole`, the rendered messages 0..last of a conversation."""

    def __init__(self, chat: Chat, whole: str, last: int, tokenizer: ChatTokenizer) -> None:
        self._messages, self._tools = chat.messages[: last + 1], chat.tools
        self._whole, self._tokenizer = whole, tokenizer

    def span(self, index: int) -> tuple[int, int]:
        """Start and end (exclusive) of the characters that the model wrote in a turn.

        A template may render a turn differently once a question follows, or refuse a conversation that ends before the
        first question. In that case, the turn is found as the part of the text that changes with its content.
        """
        whole, edges = self._whole, self._tokenizer.edges
        asked = self._rendered(self._messages[:index], ask=True)
        through = self._rendered(self._messages[: index + 1])
        begin = end = 0
        if asked is not None and through is not None:
            begin, end = shared_length(asked, whole), shared_length(through, whole)
            if begin >= len(asked) - len(edges.opening) and end >= len(through) - len(edges.closing):
                return begin, end
        return self._varied(index) or (begin, end)

    def _varied(self, index: int) -> tuple[int, int] | None:
        """The span that changes when the content of the turn is replaced by each of `PROBES`; None if none does."""
        whole, edges, turn = self._whole, self._tokenizer.edges, self._messages[index]
        for changed in ({"role": turn["role"]}, turn):
            written = [
                self._rendered([*self._messages[:index], {**changed, "content": probe}, *self._messages[index + 1 :]])
                for probe in PROBES
            ]
            one, other = written
            if one is None or other is None or one == other:
                continue
            before = one[: shared_length(one, other)]
            begin = shared_length(before, whole)
            start = before.rfind(edges.header) if edges.header else -1
            if start >= 0:
                begin = start + shared_length(edges.opening, whole[start:])
            after_reversed = one[::-1][: shared_length(one[::-1], other[::-1])]
            end = len(whole) - shared_length(after_reversed, whole[::-1])
            end += len(edges.closing) if whole.startswith(edges.closing, end) else 0
            return min(begin, end), end
        return None

    def _rendered(self, messages: list[dict[str, Any]], *, ask: bool = False) -> str | None:
        """The messages rendered; None if the template refuses them."""
        try:
            return self._tokenizer.render(messages, self._tools, ask=ask)
        except REFUSALS:
            return None
