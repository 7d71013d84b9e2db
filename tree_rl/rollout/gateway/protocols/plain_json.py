"""Decodes plain JSON, which every later step can serialize: Unicode text, finite numbers, bounded depth.

Python's decoder accepts other values, or raises one of several exceptions.
"""

import json
import math
import re
from collections.abc import Mapping
from typing import Any

MAX_DEPTH = 100
"""Deepest nesting of objects and lists. Python's encoder and decoder fail at about 1,000; tool schemas need 20."""
SURROGATE = re.compile(r"\\u[dD][89a-fA-F]")
"""Escape of a surrogate, half a character. Two halves together are valid."""


class JsonError(ValueError):
    """A text that is not the JSON expected here; `key` of the outermost object has the wrong value, if it is known."""

    def __init__(self, message: str, *, key: str | None = None) -> None:
        super().__init__(message)
        self.key = key


def decode_json(text: str) -> Any:
    """Decode Unicode text. Raises nothing but `JsonError`, whatever the text is."""
    try:
        value = json.loads(text, parse_constant=_refuse_constant, parse_float=_finite)
    except json.JSONDecodeError as error:
        raise JsonError(f"expected JSON: {error.msg} at character {error.pos}") from error
    except JsonError:
        raise
    except ValueError as error:
        raise JsonError("expected JSON with numbers of at most 4,300 digits, received a longer one") from error
    except RecursionError as error:
        raise JsonError(DEEP) from error
    check_depth(text, value)
    if SURROGATE.search(text):
        _check_text(value)
    return value


DEEP = f"expected JSON of at most {MAX_DEPTH} levels, received brackets nested too deep"


def check_depth(text: str, value: Any) -> None:
    """Raise `JsonError` if the value of a JSON text is nested deeper than `MAX_DEPTH`."""
    if text.count("[") + text.count("{") <= MAX_DEPTH:
        return
    level = [value] if isinstance(value, dict | list) else []
    for _ in range(MAX_DEPTH):
        parts = [part for one in level for part in (one.values() if isinstance(one, dict) else one)]
        level = [part for part in parts if isinstance(part, dict | list)]
        if not level:
            return
    raise JsonError(DEEP)


def _check_text(value: Any) -> None:
    """Refuse lone surrogates: no tokenizer accepts them, and no answer can contain them."""
    parts: Mapping[Any, Any] = value if isinstance(value, Mapping) else {None: value}
    for key, part in parts.items():
        try:
            json.dumps([key, part], ensure_ascii=False).encode()
        except UnicodeEncodeError as error:
            named = key if isinstance(key, str) and key.isprintable() else None
            raise JsonError("expected Unicode text, received lone surrogates", key=named) from error


def _refuse_constant(constant: str) -> None:
    raise JsonError(f"expected JSON, received {constant}, which is no JSON number")


def _finite(digits: str) -> float:
    number = float(digits)
    if not math.isfinite(number):
        raise JsonError(f"expected finite numbers, received {digits[:40]}")
    return number
