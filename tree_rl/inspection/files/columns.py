"""Columns of a parquet, arrow, jsonl, json or npz file, regardless of their meaning."""

from collections.abc import Callable, Collection
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from tree_rl.inspection.files import RowFileError
from tree_rl.inspection.files.json_text import parse_json
from tree_rl.inspection.files.npz import read_npz
from tree_rl.inspection.files.open_file import open_regular, read_bytes
from tree_rl.inspection.files.quoting import escaped, quoted_path
from tree_rl.inspection.messages.json_cells import without_padding

RECORDS = ("simulations", "rows", "data", "results")
"""Fields of a JSON object that may hold its records."""
Columns = dict[str, Any]
"""Name -> one value per row: a list with None for missing values, or for parquet and arrow a `pyarrow.ChunkedArray`."""


@dataclass(frozen=True, kw_only=True, slots=True)
class ColumnFile:
    """The requested columns of a file with at least one row."""

    path: Path
    num_rows: int
    names: tuple[str, ...]
    """Names of all columns of the file."""
    columns: Columns
    """The requested columns that the file has."""
    labels: Callable[[], dict[str, list[Any]]]
    """Reads the columns with one text or integer in every row, which could name a group."""

    def values(self, name: str) -> list[Any]:
        """One column as Python values, None in every row if the file lacks it; `InputError` if parquet is damaged."""
        column = self.columns.get(name, [None] * self.num_rows)
        if isinstance(column, list):
            return column
        # pyarrow takes half a second to import; readers of JSON do not need it.
        from tree_rl.inspection.files.parquet import values_of

        # In parquet and arrow every object of a column has the fields of all the others, as nulls.
        return [without_padding(value) for value in values_of(column, self.path)]


def read_columns(path: Path, wanted: Collection[str]) -> ColumnFile:
    """The columns of `wanted` that a file has.

    It reads *.parquet, *.arrow of Hugging Face datasets or Feather, *.jsonl with one object per line, *.json with a
    list of objects, *.json or *.traj with one object that holds the records, and *.npz of uni-agent.

    Raises:
        InputError: no such file, unknown suffix, no rows, damage, wrong encoding, or a line that is not an object.
    """
    readers: dict[str, Callable[[Path, Collection[str]], ColumnFile]] = {
        ".parquet": _read_table,
        ".jsonl": _read_jsonl,
        ".json": _read_json,
        ".arrow": _read_table,
        ".traj": _read_json,
        ".npz": _read_npz,
    }
    if path.suffix.lower() not in readers:
        # If the file is missing, say that instead.
        open_regular(path).close()
        ending = escaped(path.suffix, 20) or "no ending"
        raise RowFileError(
            f"{quoted_path(path)}: expected {', '.join(readers)}, received {ending}; rename or convert it"
        )
    found = readers[path.suffix.lower()](path, wanted)
    if not found.num_rows or not found.names:
        raise RowFileError(f"{quoted_path(path)}: expected at least one row, received none")
    return found


def _read_table(path: Path, wanted: Collection[str]) -> ColumnFile:
    # pyarrow takes half a second to import; readers of JSON do not need it.
    from tree_rl.inspection.files.parquet import read_arrow, read_labels, read_parquet

    table, names = (read_arrow if path.suffix.lower() == ".arrow" else read_parquet)(path, wanted)
    columns = {name: table.column(name) for name in table.column_names}
    labels = partial(read_labels, path)
    return ColumnFile(path=path, num_rows=table.num_rows, names=tuple(names), columns=columns, labels=labels)


def _read_npz(path: Path, wanted: Collection[str]) -> ColumnFile:
    columns = read_npz(path)
    num_rows = len(columns["prompt_ids"])
    return ColumnFile(path=path, num_rows=num_rows, names=tuple(columns), columns=columns, labels=dict)


def _read_jsonl(path: Path, wanted: Collection[str]) -> ColumnFile:
    lines = enumerate(read_bytes(path).split(b"\n"), start=1)
    named = ((f"{quoted_path(path)}, line {number}", line) for number, line in lines if line.strip())
    records = [parse_json(line, where, is_line=True) for where, line in named]
    return _columns_of(records, path, wanted)


def _read_json(path: Path, wanted: Collection[str]) -> ColumnFile:
    data = read_bytes(path)
    records = parse_json(data, quoted_path(path)) if data.strip() else []
    if isinstance(records, dict):
        records = _records_in(records, wanted)
    if not isinstance(records, list):
        raise RowFileError(
            f"{quoted_path(path)}: expected a list of objects, received {type(records).__name__}; put it in brackets "
            "(one object a line: name it *.jsonl)"
        )
    return _columns_of(records, path, wanted)


def _records_in(whole: dict[str, Any], wanted: Collection[str]) -> Any:
    """Records in one object: a run's results (tau2), or the object itself, a trajectory (SWE-agent, mini-swe-agent)."""
    if any(isinstance(whole.get(name), list) for name in wanted):
        return [whole]
    return next((whole[name] for name in RECORDS if isinstance(whole.get(name), list)), whole)


def _columns_of(records: list[Any], path: Path, wanted: Collection[str]) -> ColumnFile:
    for number, record in enumerate(records):
        if not isinstance(record, dict):
            raise RowFileError(
                f"{quoted_path(path)}: row {number}: expected an object, received {type(record).__name__}; a row is an "
                "object with a field per column"
            )
    names = dict.fromkeys(name for record in records for name in record)
    columns = {name: [record.get(name) for record in records] for name in names if name in wanted}
    labels = partial(_labels_of, records, tuple(names))
    return ColumnFile(path=path, num_rows=len(records), names=tuple(names), columns=columns, labels=labels)


def _labels_of(records: list[dict[str, Any]], names: tuple[str, ...]) -> dict[str, list[Any]]:
    values = {name: [record.get(name) for record in records] for name in names}
    return {name: column for name, column in values.items() if all(type(value) in (str, int) for value in column)}
