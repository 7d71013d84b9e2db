"""Columns of token ids and masks as jagged arrays; what is not an integer is refused, never rounded.

Legend: B rows, F flat entries.
"""

from typing import Any

import numpy as np

from tree_rl.inspection.files.errors import RowFileError
from tree_rl.inspection.files.shown import escaped, shown
from tree_rl.tree import Jagged

INT64_MAX = np.iinfo(np.int64).max


def token_id_lists(column: Any, name: str) -> Jagged:
    """Token ids of B rows, int64 [F].

    Args:
        column: B lists, or a `pyarrow.ChunkedArray`.
        name: of the column, for messages.

    Raises:
        RowFileError: a row that is absent, text or nested; an entry that is absent, a fraction, true or false, or
            beyond int64. Names row and column.
    """
    return _read(column, name, allow_bool=False)


def mark_lists(column: Any, name: str) -> Jagged:
    """Masks of B rows, bool [F], from 0 and 1 or false and true.

    Raises:
        RowFileError: as `token_id_lists`, and an entry other than 0 and 1.
    """
    marks = _read(column, name, allow_bool=True)
    wrong = (marks.values != 0) & (marks.values != 1)
    if wrong.any():
        at = int(np.argmax(wrong))
        raise _entry_error(marks.offsets, at, name, "0 or 1", marks.values[at])
    return marks.with_values(marks.values.astype(bool))


def _read(column: Any, name: str, *, allow_bool: bool) -> Jagged:
    if isinstance(column, list):
        label = escaped(name, 60)
        rows = [_from_list(value, f"row {row}, column {label}", allow_bool) for row, value in enumerate(column)]
        return Jagged.from_rows(rows, dtype=np.int64)
    # pyarrow takes half a second to import; readers of JSON do without.
    import pyarrow.types as kinds

    numbers = (kinds.is_integer, kinds.is_boolean, kinds.is_floating)
    is_list = kinds.is_list(column.type) or kinds.is_large_list(column.type)
    if is_list and any(is_kind(column.type.value_type) for is_kind in numbers):
        return _from_arrow(column, name, allow_bool)
    return _read(column.to_pylist(), name, allow_bool=allow_bool)


def _from_list(value: Any, where: str, allow_bool: bool) -> np.ndarray:
    if not isinstance(value, list):
        received = "nothing" if value is None else shown(value)
        remedy = " (text: use --tokenizer and a column of messages)" if isinstance(value, str) else ""
        raise RowFileError(f"{where}: expected a list of integers, received {received}{remedy}")
    allowed = {int, bool} if allow_bool else {int}
    if not set(map(type, value)) <= allowed:
        at = next(index for index, entry in enumerate(value) if type(entry) not in allowed)
        raise RowFileError(f"{where}: expected a list of integers, received {_named(value[at])} at {at}")
    try:
        return np.array(value, dtype=np.int64)
    except OverflowError as error:
        at = next(index for index, entry in enumerate(value) if not abs(entry) <= INT64_MAX)
        raise RowFileError(f"{where}: expected integers within int64, received {shown(value[at])} at {at}") from error


def _from_arrow(column: Any, name: str, allow_bool: bool) -> Jagged:
    """Without a Python object per token or row: 1 M tokens take milliseconds."""
    absent = np.concatenate([chunk.is_null().to_numpy(zero_copy_only=False) for chunk in column.chunks] or [[]])
    if absent.any():
        row = int(np.argmax(absent))
        raise RowFileError(f"row {row}, column {escaped(name, 60)}: expected a list of integers, received nothing")
    # Offsets point into the child, of which a slice keeps everything.
    lengths = [np.diff(chunk.offsets.to_numpy()) for chunk in column.chunks]
    values = [chunk.flatten() for chunk in column.chunks]
    offsets = np.concatenate([[0], np.cumsum(np.concatenate(lengths or [[]]), dtype=np.int64)]).astype(np.int64)
    missing = np.concatenate([part.is_null().to_numpy(zero_copy_only=False) for part in values] or [[]])
    if missing.any():
        raise _entry_error(offsets, int(np.argmax(missing)), name, "integers", None)
    flat = np.concatenate([part.to_numpy(zero_copy_only=False) for part in values] or [np.empty(0, dtype=np.int64)])
    _check_kind(flat, offsets, name, allow_bool)
    return Jagged(values=flat.astype(np.int64), offsets=offsets)


def _check_kind(flat: np.ndarray, offsets: np.ndarray, name: str, allow_bool: bool) -> None:
    kind = flat.dtype.kind
    if kind == "f" and flat.size:
        fraction = flat != np.trunc(flat)
        at = int(np.argmax(fraction | ~np.isfinite(flat)))
        raise _entry_error(offsets, at, name, "integers", float(flat[at]), flat.dtype.name)
    if kind == "b" and not allow_bool and flat.size:
        raise _entry_error(offsets, 0, name, "integers", bool(flat[0]), "bool")
    if kind == "u" and flat.size and flat.max() > INT64_MAX:
        raise _entry_error(offsets, int(np.argmax(flat > INT64_MAX)), name, "integers within int64", int(flat.max()))


def _entry_error(
    offsets: np.ndarray, at: int, name: str, expected: str, received: Any, dtype: str = ""
) -> RowFileError:
    row = int(np.searchsorted(offsets, at, side="right")) - 1
    where = f"row {row}, column {escaped(name, 60)}"
    what = f"{_named(received)}{f' ({dtype})' if dtype else ''} at {at - int(offsets[row])}"
    return RowFileError(f"{where}: expected a list of {expected}, received {what}")


def _named(entry: Any) -> str:
    """An entry that is no integer, with what to do about it."""
    if entry is None:
        return "null"
    if isinstance(entry, float) and entry.is_integer():
        return f"the float {entry} (a column with nulls turns integers into floats: drop the nulls, store int64)"
    return shown(entry)
