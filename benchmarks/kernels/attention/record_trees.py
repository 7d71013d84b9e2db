"""Writes the topology of the recorded airline agents for the kernel benchmark: no tokens, only who shares what.

python examples/write_qwen_tokenizer.py outputs/qwen_tokenizer
python benchmarks/kernels/attention/record_trees.py outputs/qwen_tokenizer
"""

import json
import sys
from pathlib import Path

import numpy as np

from tree_rl.inspection.chat_rows import RowsPer
from tree_rl.inspection.report import rows_by_group
from tree_rl.inspection.row_file import read_row_file
from tree_rl.tree import Forest

ROOT = Path(__file__).parents[3]
TASKS = 12


def topology(forest: Forest) -> dict[str, list[int]]:
    """Parents and lengths of the segments, and the segment in which each row ends."""
    last = forest.row_index.values[forest.row_index.offsets[1:] - 1]
    return {
        "parents": forest.segments.parent.tolist(),
        "lengths": forest.segments.lengths.tolist(),
        "row_ends": (np.searchsorted(forest.segments.start, last, side="right") - 1).tolist(),
    }


def main() -> None:
    """Write `recorded_trees.json` beside this file."""
    source = ROOT / "examples" / "tau_bench_airline" / "trajectories.json"
    trees: dict[str, list[dict[str, list[int]]]] = {}
    for kind in RowsPer:
        rows = read_row_file(source, tokenizer=Path(sys.argv[1]), rows_per=kind)
        groups = list(rows_by_group(rows).values())[:TASKS]
        trees[kind] = [topology(Forest.from_rows([rows[index].token_ids for index in members])) for members in groups]
    target = Path(__file__).with_name("recorded_trees.json")
    target.write_text(json.dumps(trees, separators=(",", ":")) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
