"""A Hugging Face tokenizer folder as text and ids, without transformers and torch."""

import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import tokenizers

from tree_rl.inspection.row import RowFileError
from tree_rl.rollout.gateway.tokens.chat_template import ChatTemplate


@dataclass(frozen=True, kw_only=True, slots=True)
class ChatTokenizer:
    """Vocabulary and chat template of a model."""

    vocabulary: tokenizers.Tokenizer
    """tokenizer.json."""
    template: ChatTemplate
    """Renders messages as transformers' apply_chat_template does."""

    @classmethod
    def load(cls, folder: Path) -> "ChatTokenizer":
        """Read a tokenizer folder.

        Args:
            folder: holds tokenizer.json, and the template in chat_template.jinja or tokenizer_config.json.

        Returns:
            The tokenizer.

        Raises:
            RowFileError: a file or the template is missing.
        """
        vocabulary = folder / "tokenizer.json"
        if not vocabulary.is_file():
            raise RowFileError(
                f"--tokenizer {folder}: expected a folder with tokenizer.json; save it with a fast tokenizer's "
                "save_pretrained, or run examples/write_qwen_tokenizer.py"
            )
        config_file, template_file = folder / "tokenizer_config.json", folder / "chat_template.jinja"
        config = json.loads(config_file.read_text(encoding="utf-8")) if config_file.is_file() else {}
        source = template_file.read_text(encoding="utf-8") if template_file.is_file() else config.get("chat_template")
        if not isinstance(source, str):
            raise RowFileError(f"--tokenizer {folder}: expected a chat template in chat_template.jinja, found none")
        return cls(
            vocabulary=tokenizers.Tokenizer.from_file(str(vocabulary)),
            template=ChatTemplate(source, {name: _text(config.get(name)) for name in ("bos_token", "eos_token")}),
        )

    @property
    def vocab_size(self) -> int:
        """Number of ids, control tokens included."""
        return int(self.vocabulary.get_vocab_size(with_added_tokens=True))

    def render(self, messages: list[dict[str, Any]], tools: list[Any] | None, *, ask: bool = False) -> str:
        """Messages as the text that the model reads.

        Args:
            messages: chat messages, at least one.
            tools: function schemas of the system turn; None for none.
            ask: append the header of the assistant's turn.

        Returns:
            The text. Control tokens are spelled out.
        """
        return self.template.render(messages, tools=tools or None, is_prompt=ask)

    def decode(self, ids: Sequence[int]) -> str:
        """Text of token ids. Control tokens are spelled out."""
        return str(self.vocabulary.decode(list(ids), skip_special_tokens=False))


def _text(token: Any) -> str:
    """A control token of tokenizer_config.json: text, or an object with the field `content`."""
    return str(token.get("content", "")) if isinstance(token, dict) else str(token or "")
