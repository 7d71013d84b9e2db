"""A Hugging Face tokenizer folder as text and ids, without transformers and torch."""

import json
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path
from typing import Any, NoReturn

import jinja2
import tokenizers
from jinja2.ext import loopcontrols
from jinja2.sandbox import ImmutableSandboxedEnvironment

from tree_rl.inspection.row import RowFileError


@dataclass(frozen=True, kw_only=True, slots=True)
class ChatTokenizer:
    """Vocabulary and chat template of a model."""

    vocabulary: tokenizers.Tokenizer
    """tokenizer.json."""
    template: jinja2.Template
    """Renders messages as transformers' apply_chat_template does."""
    template_settings: dict[str, str]
    """Control tokens that templates name: bos_token, eos_token."""

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
            template=_environment().from_string(source),
            template_settings={name: _text(config.get(name)) for name in ("bos_token", "eos_token")},
        )

    @property
    def vocab_size(self) -> int:
        """Ids that the tokenizer can write, control tokens included."""
        return int(self.vocabulary.get_vocab_size(with_added_tokens=True))

    def render(self, messages: list[dict[str, Any]], tools: list[Any] | None, *, ask: bool = False) -> str:
        """Messages as the text that the model reads.

        Args:
            messages: chat messages, at least one.
            tools: function schemas of the system turn; None for none.
            ask: append the header of the assistant's turn.

        Returns:
            The text, control tokens spelt out.
        """
        return self.template.render(
            messages=messages, tools=tools or None, add_generation_prompt=ask, **self.template_settings
        )

    def decode(self, ids: Sequence[int]) -> str:
        """Token ids as text, control tokens spelt out."""
        return str(self.vocabulary.decode(list(ids), skip_special_tokens=False))


def _environment() -> jinja2.Environment:
    environment = ImmutableSandboxedEnvironment(trim_blocks=True, lstrip_blocks=True, extensions=[loopcontrols])
    environment.filters["tojson"] = _to_json
    environment.globals["raise_exception"] = _refuse
    environment.globals["strftime_now"] = datetime.now().strftime
    return environment


def _to_json(value: Any, indent: int | None = None) -> str:
    # jinja's own filter escapes HTML characters, which models never see.
    return json.dumps(value, ensure_ascii=False, indent=indent)


def _refuse(message: str) -> NoReturn:
    raise jinja2.TemplateError(message)


def _text(token: Any) -> str:
    """A control token of tokenizer_config.json, which may be an object with the field `content`."""
    return str(token.get("content", "")) if isinstance(token, dict) else str(token or "")
