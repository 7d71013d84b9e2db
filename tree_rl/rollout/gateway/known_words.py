"""Token ids of ASCII text from words that were tokenized before.

Byte-level tokenizers cut text into words by a regular expression and tokenize each by itself. In ASCII text Python's
`re` finds the same words, so known ones need no tokenizer. Other text, and other tokenizers, are not for this.
"""

import json
import re
from collections.abc import Iterator
from itertools import chain
from typing import Any

MAX_CHARACTERS = 20_000
"""Of one text: longer ones leave the event loop to others only while the tokenizer has them."""
MAX_WORD = 64
"""Characters of a word that is kept."""
MAX_WORDS = 1 << 16
"""Kept at once: some 15 MB."""
GPT2 = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"
"""How `ByteLevel` cuts by itself."""
ASCII_OF_CATEGORY = {"L": "A-Za-z", "Lu": "A-Z", "Ll": "a-z", "Lt": "", "Lm": "", "Lo": "", "M": "", "N": "0-9"}
SYNTAX = re.compile(
    r"\\p\{(?P<category>\w+)\}|\\[rntsS/]|\(\?(?:i:|:|!|=)|\{\d+(?:,\d*)?\}|\[(?!\^?\])|[^\\({.^$\[]|(?<=\[)\^",
    re.DOTALL,
)
"""What Oniguruma and Python's `re` understand alike."""
PROBE = "It's I'LL a  b\n\n\t c 12345 x=y[0]; \r\n<a> --foo_bar ''' 1.5e-3   \n  \x0b\x1c\x00end \n"


class KnownWords:
    """The words of one tokenizer.

    Args:
        backend: of the package tokenizers.
        word: finds the words of ASCII text.
        added: find its added tokens, one after the other in what the ones before have left.
    """

    def __init__(self, backend: Any, word: re.Pattern[str], added: list[re.Pattern[str]]) -> None:
        self._backend = backend
        self._word = word
        self._added = added
        self._ids: dict[str, tuple[int, ...]] = {}

    def encode(self, text: str) -> list[int] | None:
        """Tokenize.

        Args:
            text: as it stands anywhere in a conversation.

        Returns:
            The tokenizer's ids; None if it has to be asked.
        """
        if len(text) > MAX_CHARACTERS or not text.isascii():
            return None
        words: list[str] = []
        for part, is_token in self._parts(text, 0):
            found = [part] if is_token else self._word.findall(part)
            if sum(map(len, found)) != len(part):
                return None
            words += found
        ids: list[Any] = list(map(self._ids.get, words))
        if None not in ids:
            return list(chain.from_iterable(ids))
        learned = self._learn({word for word, one in zip(words, ids, strict=True) if one is None})
        if learned is None:
            return None
        return list(
            chain.from_iterable(learned[word] if one is None else one for word, one in zip(words, ids, strict=True))
        )

    def _parts(self, text: str, place: int) -> Iterator[tuple[str, bool]]:
        """Added tokens (True), and what stands between them."""
        if place == len(self._added):
            yield text, False
            return
        for number, part in enumerate(self._added[place].split(text)):
            if number % 2:
                yield part, True
            else:
                yield from self._parts(part, place + 1)

    def _learn(self, words: set[str]) -> dict[str, tuple[int, ...]] | None:
        """Ask the tokenizer for words; None if it may cut one of them that stands alone."""
        asked = list(words)
        if not all(self._is_one(word) for word in asked):
            return None
        encoded = self._backend.encode_batch_fast(asked, add_special_tokens=False)
        learned = {word: tuple(one.ids) for word, one in zip(asked, encoded, strict=True)}
        if len(self._ids) > MAX_WORDS:
            self._ids.clear()
        self._ids.update({word: ids for word, ids in learned.items() if len(word) <= MAX_WORD})
        return learned

    def _is_one(self, word: str) -> bool:
        parts = [part for part in self._parts(word, 0) if part[0]]
        return len(parts) == 1 and (parts[0][1] or self._word.findall(word) == [word])


def known_words(backend: Any) -> KnownWords | None:
    """The words of a tokenizer; None if it is not known to tokenize word by word.

    Args:
        backend: of the package tokenizers.
    """
    if type(backend.model).__name__ != "BPE" or backend.model.dropout:
        return None
    if backend.truncation or backend.padding or backend.encode_special_tokens:
        return None
    if backend.normalizer is not None and type(backend.normalizer).__name__ != "NFC":
        return None
    pattern = _pattern(_settings(backend.pre_tokenizer))
    word = None if pattern is None else ascii_pattern(pattern)
    tokens = list(backend.get_added_tokens_decoder().values())
    if word is None or any(one.lstrip or one.rstrip or one.single_word for one in tokens):
        return None
    groups = [[one.content for one in tokens if one.normalized == is_normalized] for is_normalized in (False, True)]
    if not all(text.isascii() for text in groups[1]):
        return None
    # The tokenizer takes the first, and of those the longest.
    ordered = [sorted(filter(None, texts), key=len, reverse=True) for texts in groups]
    added = [re.compile(f"({'|'.join(map(re.escape, texts))})") for texts in ordered if texts]
    words = KnownWords(backend, word, added)
    expected = backend.encode_batch_fast([PROBE], add_special_tokens=False)[0].ids
    return words if words.encode(PROBE) == expected else None


def ascii_pattern(pattern: str) -> re.Pattern[str] | None:
    """What finds, in ASCII text, the matches of a pattern of Oniguruma; None for one that is not known to be alike.

    Args:
        pattern: of a pre-tokenizer.
    """
    written, place, is_class = "", 0, False
    while place < len(pattern):
        found = SYNTAX.match(pattern, place)
        if found is None:
            return None
        text, category = found[0], found["category"]
        # Sets within sets, and quantifiers of quantifiers: each engine has its own.
        if (is_class and text in "[&") or (not is_class and text in "+?" and re.search(r"[*+?}]$", written)):
            return None
        if category is not None:
            if category not in ASCII_OF_CATEGORY:
                return None
            letters = ASCII_OF_CATEGORY[category]
            text = letters if is_class else f"[{letters}]" if letters else "(?!)"
        elif text in "[]":
            is_class = text == "["
        written += text
        place = found.end()
    try:
        return re.compile(written, re.ASCII)
    except re.error:
        return None


def _settings(component: Any) -> dict[str, Any]:
    """Of a part of a tokenizer, as tokenizer.json has them."""
    settings: dict[str, Any] = {} if component is None else json.loads(component.__getstate__())
    return settings


def _pattern(cutter: dict[str, Any]) -> str | None:
    """By which a pre-tokenizer cuts text into words that are tokenized byte by byte."""
    match cutter:
        case {"type": "ByteLevel", "add_prefix_space": False, "use_regex": True}:
            return GPT2
        case {
            "type": "Sequence",
            "pretokenizers": [
                {"type": "Split", "pattern": {"Regex": str(pattern)}, "behavior": "Isolated", "invert": False},
                {"type": "ByteLevel", "add_prefix_space": False, "use_regex": False},
            ],
        }:
            return pattern
    return None
