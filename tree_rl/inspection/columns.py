"""Columns of a parquet, jsonl or json file, whatever they mean."""

import json
from pathlib import Path
from typing import Any

from tree_rl.inspection.row import RowFileError

Columns = dict[str, list[Any]]
"""Name -> one value per row; lists of integers arrive as int64 arrays, absent values as None."""


def read_columns(path: Path) -> Columns:
    """Every column of a *.parquet, of a *.jsonl with one object a line, or of a *.json with a list of objects.

    Raises:
        RowFileError: no such file, another ending, no rows, or a line that is not an object.
    """
    if not path.is_file():
        raise RowFileError(f"{path}: no such file")
    readers = {".parquet": _read_parquet, ".jsonl": _read_jsonl, ".json": _read_json}
    if path.suffix not in readers:
        raise RowFileError(f"{path}: expected {', '.join(readers)}, received {path.suffix or 'no ending'}")
    columns = readers[path.suffix](path)
    if not columns or not next(iter(columns.values())):
        raise RowFileError(f"{path}: expected at least one row, received none")
    return columns


def _read_parquet(path: Path) -> Columns:
    # pyarrow takes half a second to import; jsonl readers do without.
    import pyarrow
    import pyarrow.parquet

    try:
        table = pyarrow.parquet.read_table(path)
    except pyarrow.ArrowInvalid as error:
        raise RowFileError(f"{path}: not a parquet file: {error}") from error
    columns: Columns = {}
    for name in table.column_names:
        kind = table.schema.field(name).type
        is_list = pyarrow.types.is_list(kind) or pyarrow.types.is_large_list(kind)
        if is_list and (pyarrow.types.is_integer(kind.value_type) or pyarrow.types.is_boolean(kind.value_type)):
            rows = (row.values for chunk in table[name].chunks for row in chunk)
            # Arrays, without a Python object per token.
            columns[name] = [None if row is None else row.to_numpy(zero_copy_only=False) for row in rows]
        else:
            columns[name] = table[name].to_pylist()
    return columns


def _read_jsonl(path: Path) -> Columns:
    records = []
    with path.open(encoding="utf-8") as lines:
        for number, line in enumerate(lines):
            if line.strip():
                records.append(_parse(line, f"{path}, line {number + 1}"))
    return _columns_of(records, path)


def _read_json(path: Path) -> Columns:
    records = _parse(path.read_text(encoding="utf-8"), str(path))
    if not isinstance(records, list):
        raise RowFileError(f"{path}: expected a list of objects, received {type(records).__name__}")
    return _columns_of(records, path)


def _parse(text: str, where: str) -> Any:
    try:
        return json.loads(text)
    except json.JSONDecodeError as error:
        raise RowFileError(f"{where}: not JSON: {error}") from error


def _columns_of(records: list[Any], path: Path) -> Columns:
    for number, record in enumerate(records):
        if not isinstance(record, dict):
            raise RowFileError(f"{path}: row {number}: expected an object, received {type(record).__name__}")
    names = dict.fromkeys(name for record in records for name in record)
    return {name: [record.get(name) for record in records] for name in names}
