"""Records as a file of any format holds them, and what is read of a row."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow
import pyarrow.parquet

from tree_rl.inspection.row import Row


def write(path: Path, records: Any) -> Path:
    """Write records in the format that the name ends with. Returns the path."""
    if path.suffix == ".parquet":
        pyarrow.parquet.write_table(pyarrow.Table.from_pylist(records), path)
    elif path.suffix == ".jsonl":
        path.write_text("\n".join(map(json.dumps, records if isinstance(records, list) else [records])))
    else:
        path.write_text(json.dumps(records))
    return path


def read_of(rows: list[Row]) -> list[tuple[list[int], list[int]]]:
    """Of each row its token ids, and the places of those that train."""
    return [(row.token_ids.tolist(), np.flatnonzero(row.trained).tolist()) for row in rows]
