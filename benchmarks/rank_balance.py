"""Predicted time of the slowest rank over the mean, for recorded and equal groups: whole groups, and groups that split.

    python examples/write_qwen_tokenizer.py outputs/qwen_tokenizer
    python benchmarks/rank_balance.py --data examples/tau_bench_airline/trajectories.json \\
        --tokenizer outputs/qwen_tokenizer --out docs/benchmarks/rank_balance.csv

The mean is the cost of whole groups spread perfectly, so tokens that two ranks compute count as loss. Costs are those
of an 8B model; ranks whose GPUs share tokens are as many times as fast, their exchanges left out. No GPU is needed.
"""

import argparse
import time
from collections.abc import Sequence
from pathlib import Path

import numpy as np

from tree_rl.benchmark.batch import agent_batch
from tree_rl.benchmark.model_sizes import MODEL_SIZES
from tree_rl.benchmark.provenance import provenance
from tree_rl.benchmark.results import Columns, write_csv
from tree_rl.cost.balance import GroupPaths, lay_out_cell
from tree_rl.cost.balance.batch import lay_out_groups, paths_of_groups
from tree_rl.inspection.chat_rows import RowsPer
from tree_rl.inspection.overlap_by_group import rows_by_group
from tree_rl.inspection.row_file import read_row_file
from tree_rl.tree.bins import least_loaded

RANKS = (8, 16, 32, 48)
PLACES = [*((gpus, 1) for gpus in RANKS), (32, 2), (32, 4), (48, 2), (48, 4)]
"""GPUs, and how many of them share a rank's tokens: where splitting alone leaves ranks idle."""
MINI_BATCHES = (1, 4)
MODEL = "8b"
PROMPTS, ROWS = 50, 8
"""Size of the groups of equal lengths."""


def groups_of(source: str, args: argparse.Namespace) -> tuple[np.ndarray, list[np.ndarray]]:
    """Group and token ids of each row."""
    if source == "equal":
        shape = {"num_rows": ROWS, "row_tokens": 4096, "num_groups": PROMPTS}
        batch = agent_batch(por=0.5, trained_share=0.3, vocab=32_000, **shape)
        names, rows = batch.groups, list(batch.rows)
    else:
        recorded = read_row_file(args.data, tokenizer=args.tokenizer, rows_per=RowsPer(source))
        names, rows = tuple(row.group for row in recorded), [row.token_ids for row in recorded]
    group_of_row = np.zeros(len(rows), dtype=np.int64)
    for number, members in enumerate(rows_by_group(names).values()):
        group_of_row[members] = number
    return group_of_row, rows


def whole_groups(paths: Sequence[GroupPaths], num_ranks: int, num_cells: int) -> tuple[float, float]:
    """Time of the slowest ranks of all mini-batches with whole groups, costliest first; and the lower bound's."""
    slowest = bound = 0.0
    for cell in np.split(np.arange(len(paths)), np.arange(1, num_cells) * len(paths) // num_cells):
        cost = np.array([paths[group].whole for group in cell])
        slowest += max(cost[content].sum() for content in least_loaded(cost, num_ranks))
        bound += lay_out_cell([paths[group] for group in cell], num_ranks, trials=0).bound
    return slowest, bound


def measure(source: str, args: argparse.Namespace) -> list[Columns]:
    """One line per number of ranks and mini-batches."""
    group_of_row, rows = groups_of(source, args)
    paths = paths_of_groups(group_of_row, rows, MODEL_SIZES[MODEL].shape.cost)
    lines: list[Columns] = []
    for mini_batches in MINI_BATCHES:
        for gpus, sharing in PLACES:
            num_ranks = gpus // sharing
            mean = sum(one.whole for one in paths) / num_ranks
            slowest, bound = whole_groups(paths, num_ranks, mini_batches)
            begun = time.process_time()
            layout = lay_out_groups(group_of_row, paths, num_ranks=num_ranks, num_cells=mini_batches)
            seconds = time.process_time() - begun
            lines.append(
                {
                    "rows": source,
                    "gpus": gpus,
                    "sharing": sharing,
                    "mini_batches": mini_batches,
                    "whole_groups": round(slowest / mean, 3),
                    "split": round(float(layout.load_DC.max(axis=0).sum()) / mean, 3),
                    "lower_bound": round(bound / mean, 3),
                    "split_groups": layout.split_groups,
                    "repeated_tokens": layout.repeated_tokens,
                    "unique_tokens": sum(one.order.num_unique for one in paths),
                    "padding_rows": len(layout.order) - layout.num_rows,
                    "cpu_seconds": round(seconds, 2),
                }
            )
            print(" ".join(f"{name}={value}" for name, value in lines[-1].items()), flush=True)
    return lines


def main() -> None:
    """Predict all layouts and write the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", type=Path, required=True)
    parser.add_argument("--tokenizer", type=Path, required=True)
    parser.add_argument("--out", type=Path)
    parser.add_argument("--commit", default="", help="recorded beside each line; the default asks git")
    args = parser.parse_args()
    about = {"model": MODEL, **provenance(commit=args.commit or None)}
    lines = [line | about for source in ("trial", "call", "equal") for line in measure(source, args)]
    if args.out:
        write_csv(args.out, lines)


if __name__ == "__main__":
    main()
