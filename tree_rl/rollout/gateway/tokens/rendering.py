"""Renders conversations by a tokenizer's chat template, and tokenizes text piece by piece.

Tokenizers first split text at special tokens. So pieces that start with a special token can be tokenized separately:
they get the same ids as in the whole text, and prompts can share them.
"""

import re
from bisect import bisect_left
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from jinja2 import TemplateError

from tree_rl.rollout.gateway.dialects.families import AUTO, dialect_named
from tree_rl.rollout.gateway.protocols.fields import RequestError
from tree_rl.rollout.gateway.protocols.messages import ChatMessage
from tree_rl.rollout.gateway.tokens.call_format import other_format
from tree_rl.rollout.gateway.tokens.chat_template import ChatTemplate
from tree_rl.rollout.gateway.tokens.images import END, IMAGE, START, ImagePlaces
from tree_rl.rollout.gateway.tokens.template_form import OTHER, PROBE, TemplateForm, conversation_of, find_form

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerFast

PROBE_TOOL = {"type": "function", "function": {"name": "probe", "parameters": {}}}
INCOMPLETE_BYTES = 3
"""Most bytes of a character that is incomplete, and most marks that a tokenizer decodes them to."""
TURN_ENDS = (
    "<|im_end|>",
    "<|eot_id|>",
    "<|eom_id|>",
    "<|call|>",
    "<|return|>",
    "<|end|>",
    "<|user|>",
    "<|observation|>",
)
"""Special tokens that end turns in some family of models, besides the tokenizer's end token."""
TEMPLATE_ERRORS = (TemplateError, TypeError, ValueError, LookupError, AttributeError, ArithmeticError, RecursionError)
"""Errors that a template raises for messages that it does not expect."""


class Renderer:
    """One tokenizer and its chat template.

    Raises:
        ValueError: the tokenizer cannot tokenize piece by piece, has no special end token or no chat template, or
            transformers renders its template differently.
    """

    def __init__(
        self,
        tokenizer: "PreTrainedTokenizerFast",
        template_options: Mapping[str, Any],
        *,
        dialect: str = AUTO,
        images: ImagePlaces | None = None,
    ) -> None:
        self.images = images
        """Images of a model that reads them; None for text."""
        if not tokenizer.is_fast:
            raise ValueError(
                f"tokenizer: expected one with a tokenizer.json (fast), received {type(tokenizer).__name__}"
            )
        self._tokenizer = tokenizer
        # `tokenizer.encode` takes twice the time.
        self._backend = tokenizer.backend_tokenizer
        special = {number: token for number, token in tokenizer.added_tokens_decoder.items() if token.special}
        self.special_ids = frozenset(special)
        # Some special tokens absorb the white space around them, so text cannot be cut before them.
        plain = [str(token) for token in special.values() if not (token.lstrip or token.rstrip or token.single_word)]
        self.specials = tuple(sorted(plain, key=len, reverse=True))
        if tokenizer.eos_token not in self.specials:
            raise ValueError(
                f"tokenizer: expected its eos_token {tokenizer.eos_token!r} among its special tokens {self.specials}; "
                "set eos_token to the token that ends an assistant turn (for Qwen: <|im_end|>)"
            )
        self.end_text = tokenizer.eos_token
        self.turn_ends = (tokenizer.eos_token, *(end for end in TURN_ENDS if end in self.specials))
        """Tokens that may follow a turn: its end token or, in families without one, the start of the next message."""
        missing = [] if images is None else [token for token in (START, IMAGE, END) if token not in self.specials]
        if missing:
            raise ValueError(f"tokenizer: expected the special token {missing[0]} of a model that reads images")
        # The look-ahead cuts before a special token and keeps it. Longer tokens come first.
        self._cut = re.compile(f"(?={'|'.join(re.escape(token) for token in self.specials)})")
        self._check_pieces()
        self._settings = {**tokenizer.special_tokens_map, **template_options}
        self._templates: dict[str, ChatTemplate] = {}
        self.dialect = dialect_named(dialect, template=self._template_source([PROBE_TOOL]), tokenizer=tokenizer)
        self._form = self._find_form(template_options)
        self.other_format = other_format(self.dialect, self.render, specials=self.specials)
        self.dropped_opening, self.opens_reasoning = self._find_dropped_opening()
        """Empty or open reasoning with which the template starts every answer but which it drops from earlier turns
        (empty if there is none), and True if it is open."""

    def render(self, messages: Sequence[ChatMessage], *, tools: Sequence[Mapping[str, Any]], is_prompt: bool) -> str:
        """Render a conversation by the template; `is_prompt` ends with the start of an assistant turn.

        Raises `RequestError` if the template refuses the messages.
        """
        conversation = conversation_of(messages, self._form, self.dialect)
        return self._render(conversation, tools=tools, is_prompt=is_prompt)

    def _render(
        self, conversation: Sequence[Mapping[str, Any]], *, tools: Sequence[Mapping[str, Any]], is_prompt: bool
    ) -> str:
        offered = list(tools) or None
        source = self._template_source(offered)
        if source not in self._templates:
            self._templates[source] = ChatTemplate(source, self._settings)
        try:
            return self._templates[source].render(conversation, tools=offered, is_prompt=is_prompt)
        except TEMPLATE_ERRORS as error:
            raise RequestError(
                f"the model's chat template refuses this conversation: {error}", field="messages"
            ) from error

    def _template_source(self, tools: list[Mapping[str, Any]] | None) -> str:
        return self._tokenizer.get_chat_template(tools=tools)

    def pieces(self, text: str) -> list[str]:
        return [piece for piece in self._cut.split(text) if piece]

    def encode(self, pieces: Sequence[str]) -> list[tuple[int, ...]]:
        """Tokenize pieces of a conversation. The first may start with ordinary text, as after a generated turn."""
        # Some tokenizers treat the start of their input differently. A special token before it prevents that.
        leads = [not piece.startswith(self.specials) for piece in pieces]
        texts = [self.end_text + piece if lead else piece for piece, lead in zip(pieces, leads, strict=True)]
        # One text at a time: a batch runs in threads that all callers share, and waits for the others' texts.
        encoded = [self._encode(text) for text in texts]
        return [tuple(ids[1:]) if lead else tuple(ids) for ids, lead in zip(encoded, leads, strict=True)]

    def _encode(self, text: str) -> Sequence[int]:
        image = None if self.images is None else self.images.encode(text)
        if image is not None:
            return image
        ids: Sequence[int] = self._backend.encode_batch_fast([text], add_special_tokens=False)[0].ids
        return ids

    def decode(self, token_ids: Sequence[int]) -> str:
        """Text of tokens, including special tokens."""
        return self._decode(list(token_ids)) if self.images is None else self.images.decode(token_ids, self._decode)

    def _decode(self, token_ids: list[int]) -> str:
        return self._tokenizer.decode(token_ids, skip_special_tokens=False, clean_up_tokenization_spaces=False)

    def turn_within(self, whole: str, opened: str) -> str | None:
        """The last turn of a rendered conversation, and the text after it; None if it is not found.

        Args:
            opened: the turn's prompt as rendered. The start of the conversation may differ from it, because templates
                drop earlier reasoning when a question follows.
        """
        header = opened.removesuffix(self.dropped_opening)
        if whole.startswith(header):
            return whole.removeprefix(header).removeprefix(opened[len(header) :])
        start = max(header.rfind(token) for token in self.specials)
        _, found, turn = whole.rpartition(header[start:]) if start >= 0 else ("", "", "")
        return turn.removeprefix(opened[len(header) :]) if found else None

    def cut_end(self, turn: str, *, is_followed: bool) -> tuple[str, str] | None:
        """Split a rendered turn from the token that ends it, which is empty if the conversation ends without one.

        Args:
            is_followed: True if the text continues with the next message. Then None if no token marks the turn's end.
        """
        start = max(turn.rfind(end) for end in self.turn_ends)
        closing = next((end for end in self.turn_ends if start >= 0 and turn.startswith(end, start)), "")
        if closing and (is_followed or not turn[start + len(closing) :].strip()):
            return turn[:start], closing
        return None if is_followed else (turn, "")

    def without_end(self, token_ids: tuple[int, ...]) -> tuple[int, ...]:
        """Drop the special token at the end of a turn, if there is one."""
        return token_ids[:-1] if token_ids and token_ids[-1] in self.special_ids else token_ids

    def tokens_within(self, token_ids: Sequence[int], text: str) -> int:
        """The largest number of a turn's first tokens whose text is a prefix of `text`.

        A count that ends inside a character does not qualify.
        """

        def is_beyond(count: int) -> bool:
            decoded = self.decode(token_ids[:count])
            # The next tokens may complete the last character. Earlier marks replace bytes that are no characters.
            settled = max(0, len(decoded) - INCOMPLETE_BYTES)
            return not text.startswith(decoded[:settled] + decoded[settled:].rstrip("\ufffd"))

        count = bisect_left(range(1, len(token_ids) + 1), True, key=is_beyond)
        while count and not text.startswith(self.decode(token_ids[:count])):
            count -= 1
        return count

    def _find_form(self, options: Mapping[str, Any]) -> TemplateForm:
        form = find_form(self._written, self.dialect)
        probe = [ChatMessage(role="user", content=OTHER), ChatMessage(role="assistant", content="y", reasoning=PROBE)]
        expected = self._tokenizer.apply_chat_template(
            conversation_of(probe, form, self.dialect), tokenize=False, **options
        )
        written = self._written(probe, form)
        if written != expected:
            raise ValueError(f"chat template: expected what transformers renders, {expected!r}, received {written!r}")
        if OTHER not in written:
            raise ValueError(f"chat template: expected one that writes texts, not only lists of parts: {written!r}")
        return form

    def _written(self, messages: Sequence[ChatMessage], form: TemplateForm) -> str:
        return self._render(conversation_of(messages, form, self.dialect), tools=(), is_prompt=False)

    def _find_dropped_opening(self) -> tuple[str, bool]:
        asked, answered = ChatMessage(role="user", content="x"), ChatMessage(role="assistant", content=PROBE)
        opened = self.render([asked], tools=(), is_prompt=True)
        try:
            earlier = self.render([asked, answered, asked], tools=(), is_prompt=False)
        except RequestError:
            return "", False
        header = earlier.partition(PROBE)[0]
        added = opened.removeprefix(header) if opened.startswith(header) else ""
        if self.dialect.opens_reasoning(added):
            return added, True
        if self.dialect.reasoning_end not in added:
            return "", False
        return ("" if self.dialect.read(added, tools=(), is_reasoning_open=False).reasoning else added), False

    def _check_pieces(self) -> None:
        whole = f"{self.end_text}\nuser: a  b\n\n{self.end_text} c{self.end_text}"
        pieces = self.pieces(whole)
        together = self._tokenizer.encode(whole, add_special_tokens=False)
        apart = [token for ids in self.encode(pieces) for token in ids]
        if list(together) != apart or self.decode(self.encode(["\n x"])[0]) != "\n x":
            raise ValueError(
                f"tokenizer: expected text cut in front of {self.end_text!r} to tokenize piece by piece, received "
                f"{apart} against {list(together)} for {whole!r}; the gateway cannot keep ids exact with this tokenizer"
            )
