"""Text and tokens of conversations: the chat template, and tokenization piece by piece.

Tokenizers cut text at special tokens before anything else. So text cut in front of every special token and tokenized
piece by piece gives the ids of the whole, and pieces can be kept and shared between prompts.
"""

import re
from collections.abc import Mapping, Sequence
from typing import Any, Protocol

from jinja2 import TemplateError

from tree_rl.rollout.gateway.chat_template import ChatTemplate
from tree_rl.rollout.gateway.fields import RequestError
from tree_rl.rollout.gateway.messages import ChatMessage
from tree_rl.rollout.gateway.template_memory import TemplateMemory

PROBE = "reasoning-probe"


class Tokenizer(Protocol):
    """The part of a Hugging Face tokenizer that is used."""

    is_fast: bool
    eos_token: str
    eos_token_id: int
    added_tokens_decoder: Mapping[int, Any]
    backend_tokenizer: Any
    """Of the package tokenizers: asked directly, it answers in half the time."""

    def apply_chat_template(self, conversation: Any, **kwargs: Any) -> Any:
        """Render messages."""

    def decode(self, token_ids: Sequence[int], **kwargs: Any) -> str:
        """Turn tokens into text."""

    def encode(self, text: str, **kwargs: Any) -> list[int]:
        """Tokenize."""


class Renderer:
    """One tokenizer and its chat template.

    Args:
        tokenizer: with a chat template.
        template_options: passed to the template.

    Raises:
        ValueError: the tokenizer does not tokenize piece by piece, has no special end token or no chat template, or
            its template renders otherwise in transformers.
    """

    def __init__(self, tokenizer: Tokenizer, template_options: Mapping[str, Any]) -> None:
        if not tokenizer.is_fast:
            raise ValueError(
                f"tokenizer: expected one with a tokenizer.json (fast), received {type(tokenizer).__name__}"
            )
        self._tokenizer = tokenizer
        self._backend = tokenizer.backend_tokenizer
        self._template = ChatTemplate(tokenizer, template_options)
        special = {number: token for number, token in tokenizer.added_tokens_decoder.items() if token.special}
        self.special_ids = frozenset(special)
        # One that swallows the white space around it cannot be cut off from it.
        plain = [str(token) for token in special.values() if not (token.lstrip or token.rstrip or token.single_word)]
        self.specials = tuple(sorted(plain, key=len, reverse=True))
        if tokenizer.eos_token not in self.specials:
            raise ValueError(
                f"tokenizer: expected its eos_token {tokenizer.eos_token!r} among its special tokens {self.specials}; "
                "set eos_token to the token that ends an assistant turn (for Qwen: <|im_end|>)"
            )
        self.end_text = tokenizer.eos_token
        # A look-ahead cuts in front of a special token and keeps it; longer ones come first in the alternation.
        self._cut = re.compile(f"(?={'|'.join(re.escape(token) for token in self.specials)})")
        self._check_pieces()
        self._inline_reasoning = False
        self._probe_template(template_options)

    def render(
        self,
        messages: Sequence[ChatMessage],
        *,
        tools: Sequence[Mapping[str, Any]],
        is_prompt: bool,
        memory: TemplateMemory | None = None,
    ) -> str:
        """Write a conversation as the template does.

        Args:
            messages: from the start.
            tools: offered to the model.
            is_prompt: end with the start of an assistant turn.
            memory: of the session; None, or one that another thread is using, writes everything anew.

        Raises:
            RequestError: the template refuses the messages.
        """
        if memory is not None and memory.in_use.acquire(blocking=False):
            try:
                conversation = memory.forms(messages, inline_reasoning=self._inline_reasoning)
                return self._write(conversation, tools, is_prompt, memory)
            finally:
                memory.in_use.release()
        conversation = [message.for_template(inline_reasoning=self._inline_reasoning) for message in messages]
        return self._write(conversation, tools, is_prompt, None)

    def _write(
        self,
        conversation: Sequence[Mapping[str, Any]],
        tools: Sequence[Mapping[str, Any]],
        is_prompt: bool,
        memory: TemplateMemory | None,
    ) -> str:
        try:
            return self._template.render(conversation, tools=list(tools) or None, is_prompt=is_prompt, memory=memory)
        except (TemplateError, TypeError, KeyError, IndexError, AttributeError) as error:
            raise RequestError(
                f"the model's chat template refuses this conversation: {error}", field="messages"
            ) from error

    def pieces(self, text: str) -> list[str]:
        """Cut a text in front of every special token."""
        return [piece for piece in self._cut.split(text) if piece]

    def encode(self, pieces: Sequence[str]) -> list[tuple[int, ...]]:
        """Tokenize pieces, each as it stands in the middle of a conversation.

        Args:
            pieces: the first may start with ordinary text, as what follows a generated turn does.

        Raises:
            RequestError: text that is no Unicode.
        """
        # Some tokenizers treat the start of their input as the start of a text: a special token in front prevents that.
        leads = [not piece.startswith(self.specials) for piece in pieces]
        texts = [self.end_text + piece if lead else piece for piece, lead in zip(pieces, leads, strict=True)]
        if not texts:
            return []
        try:
            # One at a time: several go to threads that all callers of the tokenizer share, behind whatever is there.
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
        while low < high:  # the longest run of tokens whose text is not yet longer than what both texts share
            middle = (low + high + 1) // 2
            if text.startswith(self.decode(token_ids[:middle]).rstrip("\ufffd")):
                low = middle
            else:
                high = middle - 1
        while low and not text.startswith(self.decode(token_ids[:low])):
            low -= 1
        return low

    def _probe_template(self, options: Mapping[str, Any]) -> None:
        probe = [
            ChatMessage(role="user", content="x"),
            ChatMessage(role="assistant", content="y", reasoning=PROBE),
        ]
        conversation = [message.for_template(inline_reasoning=False) for message in probe]
        expected = self._tokenizer.apply_chat_template(conversation, tokenize=False, **options)
        # Both ways, which also compiles both before the first call.
        for memory in (None, TemplateMemory()):
            written = self.render(probe, tools=(), is_prompt=False, memory=memory)
            if written != expected:
                raise ValueError(
                    f"chat template: expected what transformers renders, {expected!r}, received {written!r}"
                )
        self._inline_reasoning = PROBE not in written

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
