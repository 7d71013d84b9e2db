"""Columns of token ids and masks as jagged arrays; non-integers are refused, not rounded. Legend: B rows, F entries."""

from dataclasses import dataclass
from typing import Any

import numpy as np

from tree_rl.inspection.files import RowFileError
from tree_rl.inspection.files.quoting import quoted
from tree_rl.tree.forest.jagged import Jagged, offsets_of

INT64 = np.iinfo(np.int64)
FLOAT_REMEDY = "nulls turn a column of integers into floats: drop the nulls and store it as int64"


@dataclass(frozen=True, kw_only=True, slots=True)
class _Kind:
    """The expected content of a column, and the parts of its error messages."""

    column: str
    """Name of the column, quoted for messages."""
    expected: str
    remedy: str
    allow_bool: bool

    def where(self, row: int) -> str:
        return f"row {row}, column {self.column}: expected a list of {self.expected}"

    def error(self, row: int, at: int, received: Any) -> RowFileError:
        """The error for entry `at` of a row."""
        what = "null" if received is None else quoted(received)
        what = f"the text {what}" if isinstance(received, str) else what
        remedy = FLOAT_REMEDY if isinstance(received, float) and received.is_integer() else self.remedy
        return RowFileError(f"{self.where(row)}, received {what} at {at}; {remedy}")

    def error_at(self, offsets: np.ndarray, flat: int, received: Any) -> RowFileError:
        """The error for entry `flat` of the concatenated rows."""
        row = int(np.searchsorted(offsets, flat, side="right")) - 1
        return self.error(row, flat - int(offsets[row]), received)


def token_id_lists(column: Any, name: str) -> Jagged:
    """Token ids of B rows, int64 [F], from B lists or a `pyarrow.ChunkedArray`.

    Raises:
        RowFileError: a row that is missing, text or nested; an entry that is missing, a fraction, a boolean, or
            beyond int64. Names row and column.
    """
    kind = _Kind(column=quoted(name), expected="integers", remedy="store token ids as int64", allow_bool=False)
    return _read(column, kind)


def mark_lists(column: Any, name: str) -> Jagged:
    """Masks of B rows, bool [F], from 0 and 1 or false and true; errors are those of `token_id_lists`."""
    kind = _Kind(
        column=quoted(name), expected="0 and 1", remedy="write 1 for trained tokens, 0 for others", allow_bool=True
    )
    marks = _read(column, kind)
    wrong = (marks.values != 0) & (marks.values != 1)
    if wrong.any():
        at = int(np.argmax(wrong))
        raise kind.error_at(marks.offsets, at, int(marks.values[at]))
    return marks.with_values(marks.values.astype(bool))


def _read(column: Any, kind: _Kind) -> Jagged:
    if isinstance(column, list):
        rows = [_from_list(value, row, kind) for row, value in enumerate(column)]
        return Jagged.from_rows(rows, dtype=np.int64)
    # pyarrow takes half a second to import; readers of JSON do not need it.
    import pyarrow.types as types

    numbers = (types.is_integer, types.is_boolean, types.is_floating)
    is_list = types.is_list(column.type) or types.is_large_list(column.type)
    if is_list and any(is_number(column.type.value_type) for is_number in numbers):
        return _from_arrow(column, kind)
    return _read(column.to_pylist(), kind)


def _from_list(value: Any, row: int, kind: _Kind) -> np.ndarray:
    if not isinstance(value, list):
        received = "nothing" if value is None else quoted(value)
        remedy = "text: use --tokenizer and a column of messages" if isinstance(value, str) else kind.remedy
        raise RowFileError(f"{kind.where(row)}, received {received}; {remedy}")
    allowed = {int, bool} if kind.allow_bool else {int}
    if not set(map(type, value)) <= allowed:
        at = next(index for index, entry in enumerate(value) if type(entry) not in allowed)
        raise kind.error(row, at, value[at])
    try:
        return np.array(value, dtype=np.int64)
    except OverflowError as error:
        at = next(index for index, entry in enumerate(value) if not INT64.min <= entry <= INT64.max)
        raise kind.error(row, at, value[at]) from error


def _from_arrow(column: Any, kind: _Kind) -> Jagged:
    """Reads without a Python object per token or row: 1 M tokens take milliseconds."""
    absent = _joined([chunk.is_null() for chunk in column.chunks])
    if absent.any():
        raise RowFileError(f"{kind.where(int(np.argmax(absent)))}, received nothing; drop the row")
    # flatten() instead of .values, which ignores slicing.
    values = [chunk.flatten() for chunk in column.chunks]
    offsets = offsets_of(_joined([chunk.value_lengths() for chunk in column.chunks]))
    missing = _joined([part.is_null() for part in values])
    if missing.any():
        raise kind.error_at(offsets, int(np.argmax(missing)), None)
    flat = _joined(values)
    if flat.size:
        _check_entries(flat, offsets, kind)
    return Jagged(values=flat.astype(np.int64), offsets=offsets)


def _joined(parts: list[Any]) -> np.ndarray:
    """Concatenate Arrow arrays without nulls."""
    return np.concatenate([part.to_numpy(zero_copy_only=False) for part in parts] or [np.empty(0, dtype=np.int64)])


def _check_entries(flat: np.ndarray, offsets: np.ndarray, kind: _Kind) -> None:
    if flat.dtype.kind == "f":
        # The first fraction, or the first entry if all are whole numbers.
        at = int(np.argmax((flat != np.trunc(flat)) | ~np.isfinite(flat)))
        raise kind.error_at(offsets, at, float(flat[at]))
    if flat.dtype.kind == "b" and not kind.allow_bool:
        raise kind.error_at(offsets, 0, bool(flat[0]))
    if flat.dtype.kind == "u" and flat.max() > INT64.max:
        at = int(np.argmax(flat > INT64.max))
        raise kind.error_at(offsets, at, int(flat[at]))
