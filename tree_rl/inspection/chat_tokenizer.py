"""Tokenizer and chat template from a Hugging Face folder, without transformers and torch.

A conversation of n model calls repeats its messages n times, so the encoding of each piece between control tokens is
cached.
"""

import os
import re
from bisect import bisect_right
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jinja2
import numpy as np
from tokenizers import Encoding, Tokenizer

from tree_rl.inspection.files import InputError
from tree_rl.inspection.files.hub_cache import folder_of
from tree_rl.inspection.files.json_text import parse_json
from tree_rl.inspection.files.open_file import read_bytes, read_text
from tree_rl.inspection.files.quoting import escaped, quoted, quoted_path
from tree_rl.inspection.messages.blocks import text_of
from tree_rl.inspection.messages.template_form import TemplateForm, TurnEdges
from tree_rl.rollout.gateway.tokens.chat_template import ChatTemplate


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class EncodedText:
    """Token ids of a text that was encoded in pieces."""

    ids: np.ndarray
    """int64 [L]."""
    pieces: tuple[Encoding, ...]
    """Encodings of the pieces, in order."""
    piece_character: list[int]
    """Index of the first character of each piece, then the length of the text."""
    piece_token: list[int]
    """Index of the first token of each piece, then L."""

    def token_at(self, character: int) -> int:
        """Index of the first token at or after a character, L if there is none; a tokenizer may drop characters."""
        while character < self.piece_character[-1]:
            piece = bisect_right(self.piece_character, character) - 1
            token = self.pieces[piece].char_to_token(character - self.piece_character[piece])
            if token is not None:
                return self.piece_token[piece] + int(token)
            character += 1
        return self.piece_token[-1]


class ChatTokenizer:
    """Vocabulary and chat template of a model.

    Args:
        folder: a folder with tokenizer.json, and with the template in chat_template.jinja or tokenizer_config.json; or
            an id in the local Hugging Face cache.

    Raises:
        InputError: a file or the template is missing or damaged.
    """

    def __init__(self, folder: Path) -> None:
        self._name = f"--tokenizer {quoted_path(folder)}"
        folder = folder_of(folder, "--tokenizer", "tokenizer.json", "tokenizer_config.json")
        vocabulary = folder / "tokenizer.json"
        if not os.path.isfile(vocabulary):
            raise InputError(
                f"{self._name}: expected a folder with tokenizer.json; save it with a fast "
                "tokenizer's save_pretrained, or run examples/write_qwen_tokenizer.py (`tree-rl recipes` writes it)"
            )
        config_file, template_file = folder / "tokenizer_config.json", folder / "chat_template.jinja"
        config = _read_config(config_file) if os.path.isfile(config_file) else {}
        source = read_text(template_file) if os.path.isfile(template_file) else config.get("chat_template")
        if not isinstance(source, str):
            raise InputError(f"{self._name}: expected a chat template in chat_template.jinja, found none")
        text = read_text(vocabulary)
        with _tokenizer_errors(self._name):
            self.vocabulary = Tokenizer.from_str(text)
        settings = {name: _text(config.get(name)) for name in ("bos_token", "eos_token")}
        try:
            self._template = ChatTemplate(source, settings)
        except (jinja2.TemplateError, RecursionError) as error:
            said = escaped(str(error), 160)
            raise InputError(f"{self._name}: expected a chat template in Jinja: {said}; correct it") from error
        self.form = TemplateForm.of(source, lambda messages: self.render(list(messages), None))
        """Form in which the template expects messages."""
        self.edges = TurnEdges.of(lambda messages, ask=False: self.render(messages, None, ask=ask))
        """Text that the template writes around turns."""
        self._known: dict[str, Encoding] = {}
        control = sorted({token.content for token in self.vocabulary.get_added_tokens_decoder().values()})
        self.boundary = re.compile("(" + "|".join(map(re.escape, control)) + ")") if control else None
        """Matches control tokens; None if text cannot be split there without changing its token ids."""
        if control:
            probe = f"a b{control[0]}c d{control[0]} e"
            if self.encode(probe).ids.tolist() != self.vocabulary.encode(probe, add_special_tokens=False).ids:
                self.boundary = None

    def render(self, messages: list[dict[str, Any]], tools: list[Any] | None, *, ask: bool = False) -> str:
        """Messages as the text that the model reads, with control tokens as text.

        Args:
            messages: chat messages, at least one. Media are replaced by the gateway's placeholder text.
            tools: function schemas of the system turn, or None.
            ask: append the header of the assistant's turn.
        """
        seen = [
            {**message, "content": text_of(message["content"])} if isinstance(message.get("content"), list) else message
            for message in messages
        ]
        return self._template.render(seen, tools=tools or None, is_prompt=ask)

    def encode(self, text: str) -> EncodedText:
        """Tokenise a text without adding special tokens."""
        pieces = [text] if self.boundary is None else [piece for piece in self.boundary.split(text) if piece]
        with _tokenizer_errors(self._name):
            for piece in pieces:
                if piece not in self._known:
                    self._known[piece] = self.vocabulary.encode(piece, add_special_tokens=False)
        encodings = tuple(self._known[piece] for piece in pieces)
        ids = [encoding.ids for encoding in encodings]
        return EncodedText(
            ids=np.array([token for piece in ids for token in piece], dtype=np.int64),
            pieces=encodings,
            piece_character=np.cumsum([0, *map(len, pieces)]).tolist(),
            piece_token=np.cumsum([0, *map(len, ids)]).tolist(),
        )

    def decode(self, ids: Sequence[int]) -> str:
        """Text of token ids, including control tokens."""
        return str(self.vocabulary.decode(list(ids), skip_special_tokens=False))


def _text(token: Any) -> str:
    """A control token from tokenizer_config.json, where it is text or an object with the field `content`."""
    return str(token.get("content", "")) if isinstance(token, dict) else str(token or "")


def _read_config(file: Path) -> dict[str, Any]:
    config = parse_json(read_bytes(file), quoted_path(file))
    if isinstance(config, dict):
        return config
    raise InputError(f"{quoted_path(file)}: expected an object, received {quoted(config)}; save the tokenizer again")


@contextmanager
def _tokenizer_errors(where: str) -> Iterator[None]:
    """Turn errors of the package tokenizers, which raises a bare `Exception`, into an `InputError`."""
    try:
        yield
    except Exception as error:
        if type(error) is not Exception:
            raise
        said = escaped(str(error), 160)
        raise InputError(f"{where}: expected a tokenizer that reads text: {said}; save the tokenizer again") from error
