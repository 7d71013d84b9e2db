"""Records as a file of any format holds them."""

import json
from pathlib import Path
from typing import Any

import pyarrow
import pyarrow.parquet


def write(path: Path, records: Any) -> Path:
    """Write records in the format that the name ends with. Returns the path."""
    if path.suffix == ".parquet":
        pyarrow.parquet.write_table(pyarrow.Table.from_pylist(records), path)
    elif path.suffix == ".jsonl":
        path.write_text("\n".join(map(json.dumps, records if isinstance(records, list) else [records])))
    else:
        path.write_text(json.dumps(records))
    return path
