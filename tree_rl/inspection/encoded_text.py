"""Text as token ids with a way back from characters, each piece between control tokens tokenised once.

A conversation of n model calls repeats its messages n times: memory of pieces makes that cheap.
"""

import re
from bisect import bisect_right
from dataclasses import dataclass, field

import numpy as np
from tokenizers import Encoding, Tokenizer


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class EncodedText:
    """Token ids of a text in pieces."""

    ids: np.ndarray
    """int64 [L]."""
    pieces: tuple[Encoding, ...]
    """Encodings laid end to end."""
    piece_character: list[int]
    """First character of each piece, and the length of the text."""
    piece_token: list[int]
    """First token of each piece, and L."""

    def token_at(self, character: int) -> int:
        """First token at or behind a character; L behind the last. Characters that a tokenizer drops have none."""
        while character < self.piece_character[-1]:
            piece = bisect_right(self.piece_character, character) - 1
            token = self.pieces[piece].char_to_token(character - self.piece_character[piece])
            if token is not None:
                return self.piece_token[piece] + int(token)
            character += 1
        return self.piece_token[-1]


@dataclass(kw_only=True, slots=True)
class TextEncoder:
    """A vocabulary with memory."""

    vocabulary: Tokenizer
    known: dict[str, Encoding] = field(default_factory=dict)
    """Encoding of each piece met so far."""
    boundary: re.Pattern[str] | None = field(init=False)
    """Matches control tokens; None where the text behind one depends on what stands before it."""

    def __post_init__(self) -> None:
        control = sorted({token.content for token in self.vocabulary.get_added_tokens_decoder().values()})
        self.boundary = re.compile("(" + "|".join(map(re.escape, control)) + ")") if control else None
        if control:
            probe = f"a b{control[0]}c d{control[0]} e"
            if self.encode(probe).ids.tolist() != self.vocabulary.encode(probe, add_special_tokens=False).ids:
                self.boundary = None

    def encode(self, text: str) -> EncodedText:
        """Tokenise a text as the vocabulary does, without adding tokens of its own."""
        pieces = [text] if self.boundary is None else [piece for piece in self.boundary.split(text) if piece]
        encodings = tuple(self._encode_piece(piece) for piece in pieces)
        ids = [encoding.ids for encoding in encodings]
        return EncodedText(
            ids=np.array([token for piece in ids for token in piece], dtype=np.int64),
            pieces=encodings,
            piece_character=np.cumsum([0, *map(len, pieces)]).tolist(),
            piece_token=np.cumsum([0, *map(len, ids)]).tolist(),
        )

    def _encode_piece(self, piece: str) -> Encoding:
        if piece not in self.known:
            self.known[piece] = self.vocabulary.encode(piece, add_special_tokens=False)
        return self.known[piece]
