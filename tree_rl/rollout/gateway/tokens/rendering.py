"""One tokenizer: conversations to text by its chat template, text to token ids piece by piece.

Tokenizers first cut text at special tokens. So pieces that start with a special token can be tokenized one by one: the
ids are those of the whole text, and prompts can share them.
"""

import re
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from jinja2 import TemplateError

from tree_rl.rollout.gateway.protocols.fields import RequestError
from tree_rl.rollout.gateway.protocols.messages import ChatMessage
from tree_rl.rollout.gateway.tokens.chat_template import ChatTemplate
from tree_rl.rollout.gateway.tokens.reasoning import THINK_END, split_reasoning, with_reasoning

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerFast

PROBE = "reasoning-probe"
TEMPLATE_ERRORS = (TemplateError, TypeError, ValueError, LookupError, AttributeError, ArithmeticError, RecursionError)
"""What a template raises for messages that it does not expect."""


class Renderer:
    """One tokenizer and its chat template.

    Raises:
        ValueError: the tokenizer does not tokenize piece by piece, has no special end token or no chat template, or
            its template renders otherwise in transformers.
    """

    def __init__(self, tokenizer: "PreTrainedTokenizerFast", template_options: Mapping[str, Any]) -> None:
        if not tokenizer.is_fast:
            raise ValueError(
                f"tokenizer: expected one with a tokenizer.json (fast), received {type(tokenizer).__name__}"
            )
        self._tokenizer = tokenizer
        # The tokenizer's own `encode` takes twice the time.
        self._backend = tokenizer.backend_tokenizer
        special = {number: token for number, token in tokenizer.added_tokens_decoder.items() if token.special}
        self.special_ids = frozenset(special)
        # Some special tokens swallow the white space around them. Text cannot be cut in front of those.
        plain = [str(token) for token in special.values() if not (token.lstrip or token.rstrip or token.single_word)]
        self.specials = tuple(sorted(plain, key=len, reverse=True))
        if tokenizer.eos_token not in self.specials:
            raise ValueError(
                f"tokenizer: expected its eos_token {tokenizer.eos_token!r} among its special tokens {self.specials}; "
                "set eos_token to the token that ends an assistant turn (for Qwen: <|im_end|>)"
            )
        self.end_text = tokenizer.eos_token
        # The look-ahead cuts in front of a special token and keeps it. Longer tokens come first.
        self._cut = re.compile(f"(?={'|'.join(re.escape(token) for token in self.specials)})")
        self._check_pieces()
        self._settings = {**tokenizer.special_tokens_map, **template_options}
        self._templates: dict[str, ChatTemplate] = {}
        self._inline_reasoning = False
        self._probe_template(template_options)
        self.empty_reasoning = self._find_empty_reasoning()
        """What the template opens every answer with, if it closes the reasoning at once and leaves it out of earlier
        turns; else empty."""

    def render(self, messages: Sequence[ChatMessage], *, tools: Sequence[Mapping[str, Any]], is_prompt: bool) -> str:
        """Write a conversation as the template does.

        Args:
            is_prompt: end with the start of an assistant turn.

        Raises:
            RequestError: the template refuses the messages.
        """
        conversation = [template_form(message, inline_reasoning=self._inline_reasoning) for message in messages]
        offered = list(tools) or None
        try:
            return self._template(offered).render(conversation, tools=offered, is_prompt=is_prompt)
        except TEMPLATE_ERRORS as error:
            raise RequestError(
                f"the model's chat template refuses this conversation: {error}", field="messages"
            ) from error

    def _template(self, tools: list[Mapping[str, Any]] | None) -> ChatTemplate:
        source = self._tokenizer.get_chat_template(tools=tools)
        if source not in self._templates:
            self._templates[source] = ChatTemplate(source, self._settings)
        return self._templates[source]

    def pieces(self, text: str) -> list[str]:
        """Cut a text in front of every special token."""
        return [piece for piece in self._cut.split(text) if piece]

    def encode(self, pieces: Sequence[str]) -> list[tuple[int, ...]]:
        """Tokenize pieces, each as it stands in the middle of a conversation.

        Args:
            pieces: the first may start with ordinary text, as what follows a generated turn does.

        Raises:
            RequestError: the text is not Unicode.
        """
        # Some tokenizers treat the start of their input as the start of a text. A special token in front prevents it.
        leads = [not piece.startswith(self.specials) for piece in pieces]
        texts = [self.end_text + piece if lead else piece for piece, lead in zip(pieces, leads, strict=True)]
        if not texts:
            return []
        try:
            # One text at a time: a batch goes to threads that all callers share, and waits for the texts of others.
            encoded = [self._backend.encode_batch_fast([text], add_special_tokens=False)[0].ids for text in texts]
        except (UnicodeEncodeError, TypeError) as error:
            raise RequestError("expected Unicode text, received lone surrogates", field="messages") from error
        return [tuple(ids[1:]) if lead else tuple(ids) for ids, lead in zip(encoded, leads, strict=True)]

    def decode(self, token_ids: Sequence[int]) -> str:
        """Text of tokens, special ones included."""
        return self._tokenizer.decode(list(token_ids), skip_special_tokens=False, clean_up_tokenization_spaces=False)

    def without_end(self, token_ids: tuple[int, ...]) -> tuple[int, ...]:
        """Drop the special token that ended a turn, if one did."""
        return token_ids[:-1] if token_ids and token_ids[-1] in self.special_ids else token_ids

    def tokens_within(self, token_ids: Sequence[int], text: str) -> int:
        """How many of the first tokens a text begins with.

        Args:
            token_ids: a generated turn.
            text: what stands in its place now.

        Returns:
            The largest count whose decoded text is a prefix of `text`; bytes of an unfinished character do not count.
        """
        low, high = 0, len(token_ids)
        while low < high:  # the longest run of tokens whose text both texts share
            middle = (low + high + 1) // 2
            if text.startswith(self.decode(token_ids[:middle]).rstrip("\ufffd")):
                low = middle
            else:
                high = middle - 1
        while low and not text.startswith(self.decode(token_ids[:low])):
            low -= 1
        return low

    def _probe_template(self, options: Mapping[str, Any]) -> None:
        probe = [ChatMessage(role="user", content="x"), ChatMessage(role="assistant", content="y", reasoning=PROBE)]
        conversation = [template_form(message, inline_reasoning=False) for message in probe]
        expected = self._tokenizer.apply_chat_template(conversation, tokenize=False, **options)
        written = self.render(probe, tools=(), is_prompt=False)
        if written != expected:
            raise ValueError(f"chat template: expected what transformers renders, {expected!r}, received {written!r}")
        self._inline_reasoning = PROBE not in written

    def _find_empty_reasoning(self) -> str:
        asked, answered = ChatMessage(role="user", content="x"), ChatMessage(role="assistant", content=PROBE)
        opened = self.render([asked], tools=(), is_prompt=True)
        try:
            earlier = self.render([asked, answered, asked], tools=(), is_prompt=False)
        except RequestError:
            return ""
        header = earlier.partition(PROBE)[0]
        added = opened.removeprefix(header) if opened.startswith(header) else ""
        return added if THINK_END in added and not split_reasoning(added)[0] else ""

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


def template_form(message: ChatMessage, *, inline_reasoning: bool) -> dict[str, Any]:
    """A message as chat templates read it. Some have no field for reasoning: then it goes into the text."""
    form: dict[str, Any] = {"role": message.role, "content": message.content}
    if message.reasoning is not None:
        if inline_reasoning:
            form["content"] = with_reasoning(message.reasoning, message.content)
        else:
            form["reasoning_content"] = message.reasoning
    if message.tool_calls:
        form["tool_calls"] = [
            {"type": "function", "id": call.id, "function": {"name": call.name, "arguments": call.arguments}}
            for call in message.tool_calls
        ]
    if message.tool_call_id is not None:
        form["tool_call_id"] = message.tool_call_id
    if message.name is not None:
        form["name"] = message.name
    return form
