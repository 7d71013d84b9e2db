"""JSON of a user's file, with bounded depth and digits and without duplicate keys."""

import json
import sys
from collections import Counter
from typing import Any

from tree_rl.inspection.files import InputError
from tree_rl.inspection.files.open_file import decode_utf8
from tree_rl.inspection.files.quoting import quoted
from tree_rl.rollout.gateway.protocols.plain_json import MAX_DEPTH, JsonError, check_depth


def parse_json(data: bytes, where: str, *, is_line: bool = False) -> Any:
    """One JSON value; raises an InputError, which begins with `where`, for others, deep nesting or a duplicate key.

    Args:
        data: text of a file, or of a line.
        where: beginning of error messages.
        is_line: `data` is a line of a *.jsonl file.
    """
    text = decode_utf8(data, where)
    try:
        value = json.loads(text, object_pairs_hook=_every_key_once)
        check_depth(text, value)
        return value
    except (RecursionError, JsonError) as error:
        raise InputError(
            f"{where}: expected lists and objects at most {MAX_DEPTH} deep; flatten the deeper ones"
        ) from error
    except json.JSONDecodeError as error:
        raise InputError(f"{where}: not JSON: {error}; {_remedy(text, error, is_line)}") from error
    except InputError as error:
        raise InputError(f"{where}: {error}") from error
    except ValueError as error:
        digits = sys.get_int_max_str_digits()
        expected = f"integers of at most {digits:,} digits"
        raise InputError(f"{where}: expected {expected}, received a longer one; shorten it") from error


def _every_key_once(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    record = dict(pairs)
    if len(record) < len(pairs):
        ((twice, _),) = Counter(name for name, _ in pairs).most_common(1)
        raise InputError(f"expected every key of an object once, received {quoted(twice)} twice; drop one")
    return record


def _remedy(text: str, error: json.JSONDecodeError, is_line: bool) -> str:
    if error.msg == "Extra data" and text[error.pos] in "{[":
        named = "a file with one object a line is named *.jsonl"
        return "give each object a line, ended by a line feed (a carriage return ends none)" if is_line else named
    return "correct that place, or write the file again"
