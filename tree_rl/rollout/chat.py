"""Token ids of a conversation, where what the model generated is never tokenized again.

The chat template renders the first prompt and, each turn, only what follows the assistant's end token.
"""

from collections.abc import Mapping, Sequence
from typing import Any, Protocol

PLACEHOLDER = "assistant-turn-placeholder"
THINK_START, THINK_END = "<think>", "</think>"


class Tokenizer(Protocol):
    """The part of a Hugging Face tokenizer that is used."""

    eos_token: str
    eos_token_id: int

    def apply_chat_template(self, conversation: Any, **kwargs: Any) -> Any:
        """Render messages."""

    def encode(self, text: str, **kwargs: Any) -> list[int]:
        """Tokenize."""

    def decode(self, token_ids: Sequence[int], **kwargs: Any) -> str:
        """Turn tokens into text."""


class Chat:
    """Renders conversations of one tokenizer.

    Args:
        tokenizer: with a chat template in which an assistant turn ends with the end token.
        template_options: passed to the template (for example `enable_thinking`).

    Raises:
        ValueError: the template does not end assistant turns with the tokenizer's end token.
    """

    def __init__(self, tokenizer: Tokenizer, template_options: Mapping[str, Any] | None = None) -> None:
        self._tokenizer = tokenizer
        self._options = dict(template_options or {})
        self._think_end = self._single_token(THINK_END)
        self.observation_ids(["check"])

    def prompt_ids(
        self, messages: Sequence[Mapping[str, Any]], tools: Sequence[Mapping[str, Any]] | None = None
    ) -> list[int]:
        """Render a conversation that the model continues.

        Args:
            messages: chat messages.
            tools: tool descriptions for the system prompt.
        """
        return self._encode(self._render(messages, tools=list(tools) if tools else None, add_generation_prompt=True))

    def observation_ids(self, contents: Sequence[str], *, role: str = "tool") -> list[int]:
        """Render what comes after an assistant turn's end token: messages and the start of the next turn.

        Args:
            contents: one message each, in order.
            role: of the messages.

        Returns:
            Token ids to append to prompt + response.
        """
        messages = [{"role": "user", "content": "x"}, {"role": "assistant", "content": PLACEHOLDER}]
        messages += [{"role": role, "content": content} for content in contents]
        text = self._render(messages, add_generation_prompt=True)
        ending = PLACEHOLDER + self._tokenizer.eos_token
        if ending not in text:
            raise ValueError(
                f"chat template: expected an assistant turn to end with the tokenizer's eos_token "
                f"{self._tokenizer.eos_token!r}, rendered {text!r}; set eos_token (for Qwen: <|im_end|>)"
            )
        return self._encode(text.split(ending, 1)[1])

    def without_reasoning(self, response_ids: Sequence[int]) -> list[int]:
        """Drop a turn's reasoning, keep the generated ids of the rest.

        Args:
            response_ids: a generated turn.

        Returns:
            The ids behind the last `</think>` and the white space after it; all of them if there is no reasoning.
        """
        ids = list(response_ids)
        if self._think_end is None:
            text = self._tokenizer.decode(ids, skip_special_tokens=False)
            return self._encode(text.rsplit(THINK_END, 1)[1].lstrip()) if THINK_END in text else ids
        if self._think_end not in ids:
            return ids
        start = len(ids) - ids[::-1].index(self._think_end)
        while start < len(ids) and not self._tokenizer.decode([ids[start]], skip_special_tokens=False).strip():
            start += 1
        return ids[start:]

    def without_open_reasoning(self, prompt_ids: Sequence[int]) -> list[int]:
        """Drop the `<think>` with which some templates open a turn, as the turn's reasoning is dropped."""
        tail_length = 8
        tail = self._tokenizer.decode(list(prompt_ids[-tail_length:]), skip_special_tokens=False)
        if not tail.rstrip().endswith(THINK_START):
            return list(prompt_ids)
        kept = self._encode(tail.rstrip().removesuffix(THINK_START))
        return [*prompt_ids[:-tail_length], *kept]

    def text(self, response_ids: Sequence[int]) -> str:
        """Decode a turn, its end token removed."""
        return self._tokenizer.decode(list(response_ids), skip_special_tokens=False).removesuffix(
            self._tokenizer.eos_token
        )

    def is_finished(self, response_ids: Sequence[int]) -> bool:
        """Whether a turn ends with the end token."""
        return bool(response_ids) and response_ids[-1] == self._tokenizer.eos_token_id

    def cut(self, text: str, max_tokens: int) -> str:
        """Shorten a text to about a number of tokens, from the middle."""
        ids = self._encode(text)
        if len(ids) <= max_tokens:
            return text
        half = max_tokens // 2
        head, tail = (self._tokenizer.decode(part, skip_special_tokens=False) for part in (ids[:half], ids[-half:]))
        return f"{head}\n[...]\n{tail}"

    def _render(self, messages: Sequence[Mapping[str, Any]], **kwargs: Any) -> str:
        return str(self._tokenizer.apply_chat_template(list(messages), tokenize=False, **kwargs, **self._options))

    def _encode(self, text: str) -> list[int]:
        return list(self._tokenizer.encode(text, add_special_tokens=False))

    def _single_token(self, text: str) -> int | None:
        ids = self._encode(text)
        return ids[0] if len(ids) == 1 else None
