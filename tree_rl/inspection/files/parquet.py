"""Columns of a parquet or arrow file; damage is reported, never guessed around."""

from collections.abc import Collection, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, BinaryIO

# pyarrow takes half a second to import, so readers of JSON do not import this module.
import pyarrow
import pyarrow.ipc
import pyarrow.parquet

from tree_rl.inspection.files import InputError
from tree_rl.inspection.files.open_file import kind_of_bytes, open_regular
from tree_rl.inspection.files.quoting import escaped, quoted, quoted_path

MAGIC, ARROW_MAGIC = b"PAR1", b"ARROW1"


def read_parquet(path: Path, names: Collection[str] | None = None) -> tuple[pyarrow.Table, list[str]]:
    """Read the columns of `names` that the file has (None: all), and the names of all its columns.

    Raises:
        InputError: no file, not parquet, truncated or damaged, or a duplicate column name.
    """
    with open_regular(path) as stream, damage(path):
        first = stream.read(64)
        if not first.startswith(MAGIC):
            raise InputError(f"{quoted_path(path)}: not a parquet file: {_instead(first)}")
        file = pyarrow.parquet.ParquetFile(stream, page_checksum_verification=True)
        known = list(file.schema_arrow.names)
        if len(set(known)) < len(known):
            twice = next(name for index, name in enumerate(known) if name in known[:index])
            raise InputError(
                f"{quoted_path(path)}: expected every column once, received {quoted(twice)} twice; drop one"
            )
        table = file.read(columns=known if names is None else [name for name in known if name in names])
        table.validate(full=True)
        return table, known


def read_arrow(path: Path, names: Collection[str]) -> tuple[pyarrow.Table, list[str]]:
    """Like `read_parquet`, for a stream (`save_to_disk` of Hugging Face datasets, its cache) or a file of Feather."""
    with open_regular(path) as stream, damage(path):
        table = _open_arrow(stream).read_all()
        table.validate(full=True)
        known = list(table.column_names)
        return table.select([name for name in known if name in names]), known


def read_labels(path: Path) -> dict[str, list[Any]]:
    """Columns of a parquet or Arrow file with a text or an integer in every row."""
    is_arrow = path.suffix.lower() == ".arrow"
    with open_regular(path) as stream, damage(path):
        schema = _open_arrow(stream).schema if is_arrow else pyarrow.parquet.read_schema(stream)
    names = [field.name for field in schema if _is_label(field.type)]
    table, _ = (read_arrow if is_arrow else read_parquet)(path, names)
    return {name: values_of(table.column(name), path) for name in names if not table.column(name).null_count}


def _open_arrow(stream: BinaryIO) -> Any:
    """A reader of Arrow's stream format, or of its file format, which begins with a signature."""
    is_file = stream.read(len(ARROW_MAGIC)) == ARROW_MAGIC
    stream.seek(0)
    return (pyarrow.ipc.open_file if is_file else pyarrow.ipc.open_stream)(stream)


def _is_label(kind: pyarrow.DataType) -> bool:
    types = pyarrow.types
    kind = kind.value_type if types.is_dictionary(kind) else kind
    return bool(types.is_string(kind) or types.is_large_string(kind) or types.is_integer(kind))


def values_of(column: pyarrow.ChunkedArray, path: Path) -> list[Any]:
    """Python values of a column; raises `InputError` if a value does not fit its type."""
    with damage(path):
        values: list[Any] = column.to_pylist()
        return values


@contextmanager
def damage(path: Path) -> Iterator[None]:
    """Turn errors of pyarrow on damaged files into an `InputError`."""
    try:
        yield
    except InputError:
        raise
    except (pyarrow.ArrowException, OSError, ValueError, KeyError, OverflowError) as error:
        raise InputError(
            f"{quoted_path(path)}: expected a whole {path.suffix[1:]} file, but it is cut off or damaged: "
            f"{escaped(str(error).strip(), 120)}; write or copy it again"
        ) from error


def _instead(first: bytes) -> str:
    if not first:
        return "it is empty; write it again"
    if first.lstrip()[:1] in (b"{", b"["):
        return "it holds JSON; name it *.json (a list) or *.jsonl (one object a line)"
    known = kind_of_bytes(first)
    return f"it is {known}" if known else f"it begins with {quoted(first[:8])}; write it with pandas or pyarrow"
