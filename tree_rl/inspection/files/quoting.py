"""Makes text of a file safe to print in a terminal: short, on one line, control characters escaped."""

import reprlib
from collections.abc import Collection
from pathlib import Path
from typing import Any

import numpy as np

VALUE_LENGTH, PATH_LENGTH, MOST_NAMES = 60, 200, 12
LARGEST_WRITTEN = 10**40
"""For larger integers only the number of digits is printed: Python refuses to print more than 4,300 digits."""

_SHORT = reprlib.Repr()
_SHORT.maxlevel, _SHORT.maxstring, _SHORT.maxother = 3, VALUE_LENGTH, VALUE_LENGTH


def escaped(text: str, length: int | None = None) -> str:
    r"""Text of at most `length` characters, with escape codes, line ends and lone surrogates escaped, as in `\x1b`.

    Unescaped, they would let a file move the cursor, colour the screen or break a line of output.
    """
    if length is not None and len(text) > length:
        text = text[: length - 1] + "…"
    if text.isprintable():
        return text
    return "".join(sign if sign.isprintable() else sign.encode("unicode_escape").decode("ascii") for sign in text)


def quoted(value: Any) -> str:
    """The beginning of a value of any size and depth."""
    if isinstance(value, str):
        return escaped(value, VALUE_LENGTH)
    if isinstance(value, np.ndarray):
        value = value[: _SHORT.maxlist + 1].tolist()
    if type(value) is int and abs(value) >= LARGEST_WRITTEN:
        return f"an integer of about {round(value.bit_length() * 0.30103)} digits"
    return escaped(_SHORT.repr(value), VALUE_LENGTH)


def quoted_path(path: Path | str) -> str:
    """A path; the middle of a very long one is left out."""
    text = str(path)
    if len(text) > PATH_LENGTH:
        text = f"{text[: PATH_LENGTH // 2]}…{text[-PATH_LENGTH // 2 :]}"
    return escaped(text)


def quoted_names(names: Collection[str]) -> str:
    """The first names, separated by commas, and the number of those left out."""
    more = len(names) - MOST_NAMES
    return ", ".join(quoted(name) for name, _ in zip(names, range(MOST_NAMES), strict=False)) + (
        f" and {more:,} more" if more > 0 else ""
    )
