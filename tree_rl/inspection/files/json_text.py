"""JSON of a user's file: depth and digits bounded, every key once."""

import json
import re
import sys
from collections import Counter
from typing import Any

import numpy as np

from tree_rl.inspection.files.errors import InputError
from tree_rl.inspection.files.reading import decode_utf8
from tree_rl.inspection.files.shown import shown

MAX_DEPTH = 100
"""Deepest nesting of lists and objects. Python's decoder and printer fail at about 1,000; tool schemas need 20."""

# Possessive: an unclosed quote costs one pass, not one for every quote behind it.
_STRING = re.compile(rb'"[^"\\]*+(?:\\.[^"\\]*+)*+(?:"|\\?\Z)', re.DOTALL)
_STEP = np.zeros(256, dtype=np.int8)
_STEP[list(b"[{")] = 1
_STEP[list(b"]}")] = -1


def parse_json(data: bytes, where: str) -> Any:
    """One JSON value; `where` begins the messages.

    Raises:
        InputError: not UTF-8, not JSON, nested too deep, an integer of thousands of digits, a key that stands twice.
    """
    text = decode_utf8(data, where)
    if _depth(data) > MAX_DEPTH:
        raise InputError(f"{where}: expected lists and objects at most {MAX_DEPTH} deep; flatten the deeper ones")
    try:
        return json.loads(text, object_pairs_hook=_every_key_once)
    except json.JSONDecodeError as error:
        raise InputError(f"{where}: not JSON: {error}; {_remedy(text, error)}") from error
    except InputError as error:
        raise InputError(f"{where}: {error}") from error
    except ValueError as error:
        digits = sys.get_int_max_str_digits()
        expected = f"integers of at most {digits:,} digits"
        raise InputError(f"{where}: expected {expected}, received a longer one; shorten it") from error


def _depth(data: bytes) -> int:
    if data.count(b"[") + data.count(b"{") <= MAX_DEPTH:
        return 0
    steps = _STEP[np.frombuffer(_STRING.sub(b"", data), dtype=np.uint8)]
    return int(np.cumsum(steps[steps != 0], dtype=np.int64).max(initial=0))


def _every_key_once(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    record = dict(pairs)
    if len(record) < len(pairs):
        ((twice, _),) = Counter(name for name, _ in pairs).most_common(1)
        raise InputError(f"expected every key of an object once, received {shown(twice)} twice; drop one")
    return record


def _remedy(text: str, error: json.JSONDecodeError) -> str:
    if error.msg == "Extra data" and text[error.pos] in "{[":
        return "a file with one object a line is named *.jsonl"
    return "correct that place, or write the file again"
