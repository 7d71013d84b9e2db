"""Makes verl's data set of a benchmark's published file: parquet, jsonl, json, or a folder of tasks.

python -m tree_rl.rollout.environments.benchmarks.published_files swe_gym train.parquet swe_gym.parquet
"""

import argparse
import json
import sys
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import pandas as pd

from tree_rl.rollout.environments.benchmarks.named import BENCHMARKS

REQUEST = "Solve this task in the working directory.\n\n{statement}"
TASK_FILES = ("task.toml", "task.yaml")


def published_rows(name: str, path: Path) -> list[Mapping[str, Any]]:
    """The rows of a published file, or the folders of tasks below a path.

    Raises `ValueError` for an unknown benchmark, a missing file or column, or a file of another kind.
    """
    if name not in BENCHMARKS:
        raise ValueError(f"environment={name!r}: expected one of {', '.join(BENCHMARKS)}")
    if not path.exists():
        raise ValueError(f"{path}: no such file or folder")
    columns = BENCHMARKS[name].columns
    if not columns:
        return list(_folders(name, path))
    if path.suffix == ".parquet":
        # pandas reads nested arrays as numpy arrays; JSON converts them to lists.
        rows = json.loads(pd.read_parquet(path).to_json(orient="records"))
    elif path.suffix == ".jsonl":
        rows = [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines() if line.strip()]
    elif path.suffix == ".json":
        rows = json.loads(path.read_text(encoding="utf-8"))
    else:
        raise ValueError(f"{path}: expected a file .parquet, .jsonl or .json of {name}")
    given = set().union(*rows) if rows else set()
    if missing := [column for column in columns if column not in given]:
        raise ValueError(f"{path}: {name} expects the column {missing[0]!r}, received {', '.join(sorted(given))}")
    return rows


def _folders(name: str, path: Path) -> Iterator[Mapping[str, Any]]:
    folders = sorted({found.parent for task in TASK_FILES for found in path.rglob(task)})
    if not folders:
        raise ValueError(f"{path}: {name} expects folders with {' or '.join(TASK_FILES)}, found none")
    for folder in folders:
        files = {}
        for file in sorted(folder.rglob("*")):
            relative = file.relative_to(folder).as_posix()
            # The other files are for building the image, or the solution.
            if file.is_file() and (
                relative.startswith("tests/") or relative.count("/") == 0 or file.name == "Dockerfile"
            ):
                try:
                    files[relative] = file.read_text(encoding="utf-8")
                except UnicodeDecodeError as error:
                    raise ValueError(f"{file}: expected a text, as tests are written as texts: {error}") from error
        yield {"name": folder.name, "files": files}


def to_data_set(name: str, rows: Sequence[Mapping[str, Any]]) -> tuple[list[dict[str, Any]], list[str]]:
    """Rows of verl's data set, and the reasons why others are left out."""
    kept: list[dict[str, Any]] = []
    refused = []
    for row in rows:
        try:
            task = BENCHMARKS[name].read(row)
        except ValueError as error:
            refused.append(str(error))
            continue
        kept.append(
            {
                "data_source": name,
                "prompt": [{"role": "user", "content": REQUEST.format(statement=task.problem_statement)}],
                "ability": "software",
                "reward_model": {"style": "rule", "ground_truth": ""},
                "extra_info": {"index": len(kept), "instance_id": task.instance_id, "row": json.dumps(row)},
            }
        )
    return kept, refused


def main(arguments: Sequence[str] | None = None) -> None:
    """Write the data set and report the rows that were left out."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("name", help=", ".join(BENCHMARKS))
    parser.add_argument("published", type=Path, help="the published file, or a folder of tasks")
    parser.add_argument("out", type=Path, help="the data set, parquet")
    parser.add_argument("--image", help="of tasks whose folder names none; {name} becomes the task's")
    chosen = parser.parse_args(arguments)
    if not chosen.out.parent.is_dir() or chosen.out.is_dir() or chosen.out == chosen.published:
        parser.error(f"{chosen.out}: expected another file, in a folder that exists")
    try:
        rows = published_rows(chosen.name, chosen.published)
    except ValueError as error:
        parser.error(str(error))
    if chosen.image:
        rows = [{**row, "image": chosen.image.replace("{name}", row.get("name", ""))} for row in rows]
    kept, refused = to_data_set(chosen.name, rows)
    for reason in refused:
        print(f"left out: {reason}", file=sys.stderr)
    if not kept:
        parser.error(f"{chosen.published}: no task is left")
    pd.DataFrame(kept).to_parquet(chosen.out)
    print(f"{len(kept)} tasks in {chosen.out}, {len(refused)} left out")


if __name__ == "__main__":
    main()
