"""Measured steps of `scaling_gpus.py` against what `tree-rl plan --ranks` predicts for them.

    python benchmarks/predicted_steps.py docs/benchmarks/scale_check.csv docs/benchmarks/collectives.csv

The rows on one GPU set its rate, their median; nothing else is fitted, and collectives are those that were measured.
The error is predicted over measured, less 1.
"""

import argparse
import statistics
from collections.abc import Mapping, Sequence
from pathlib import Path

import numpy as np

from tree_rl.benchmark.results import Columns, read_csv, write_csv
from tree_rl.cost.cluster.hardware import Cluster
from tree_rl.cost.cluster.parameters import Parameters
from tree_rl.cost.cluster.step import StepModel, StepWork
from tree_rl.cost.model_sizes import MODEL_SIZES
from tree_rl.inspection.text import format_table

Row = Mapping[str, str]
HEADER = ("model", "layers", "GPUs", "S", "tokens a rank", "measured s", "predicted s", "error")
MOST_ERROR = 0.10
"""Target."""


def step_model(row: Row, cluster: Cluster) -> StepModel:
    """Of the model and the GPUs of a row."""
    size = MODEL_SIZES[row["model"].removeprefix("qwen3-")].with_layers(int(row["layers"]))
    parameters = Parameters.of(size.shape, size.config)
    return StepModel(shape=size.shape, parameters=parameters, cluster=cluster, sharing=int(row["sharing"]))


def work_of(row: Row) -> StepWork:
    """What every rank did: the arm `equal` gives all the same."""
    load_C, tokens_C = np.array([float(row["operations"])]), np.array([int(row["unique_tokens_per_rank"])])
    budget = int(row["max_tokens"])
    return StepWork(load_C=load_C, mean_C=load_C, forwards_C=-(-tokens_C // budget), tokens_C=tokens_C, budget=budget)


def measured_cluster(collectives: Sequence[Row]) -> Cluster:
    """The slowest of the measured collectives' bandwidths, the longest latency."""
    link = min((float(row["bandwidth"]) for row in collectives), default=Cluster.link)
    latency = max((float(row["latency"]) for row in collectives), default=Cluster.latency)
    return Cluster(gpus=1, link=link, latency=max(latency, 1e-6))


def check(rows: Sequence[Row], collectives: Sequence[Row]) -> list[Columns]:
    """Measured and predicted seconds of each row.

    Raises:
        ValueError: no row on one GPU.
    """
    alone = [row for row in rows if row["gpus"] == "1"]
    if not alone:
        raise ValueError("expected a row on one GPU, which sets the rate, found none")
    cluster = measured_cluster(collectives)
    rates = []
    for row in alone:
        spent = step_model(row, cluster).time(work_of(row))
        rates.append(cluster.flops * spent.balanced / (median_seconds(row) - spent.optimizer))
    rate = statistics.median(rates)
    lines: list[Columns] = []
    for row in rows:
        if row["arm"] != "equal":
            continue
        on = Cluster(gpus=int(row["gpus"]), flops=rate, link=cluster.link, latency=cluster.latency)
        predicted, measured = step_model(row, on).time(work_of(row)), median_seconds(row)
        named: Columns = {name: row[name] for name in ("model", "layers", "gpus", "sharing", "unique_tokens_per_rank")}
        parts = {"exposed_s": predicted.gathers, "exchanges_s": predicted.exchanges, "tflops": rate / 1e12}
        figures = {"measured_s": measured, "predicted_s": predicted.total, "error": predicted.total / measured - 1}
        about = {name: row[name] for name in ("attention", "device", "torch", "verl", "commit", "date") if name in row}
        lines.append(named | figures | parts | about)
    return lines


def verdicts(lines: Sequence[Columns]) -> list[str]:
    """The largest error of each number of GPUs against the target."""
    errors: dict[str, list[float]] = {}
    for line in lines:
        errors.setdefault(str(line["gpus"]), []).append(abs(float(str(line["error"]))))
    return [
        f"{gpus} GPUs: off by {max(found):.1%} at most, target {MOST_ERROR:.0%}: "
        f"{'met' if max(found) <= MOST_ERROR else 'missed'}"
        for gpus, found in errors.items()
    ]


def median_seconds(row: Row) -> float:
    """Of a row's steps."""
    return statistics.median(map(float, row["steps_s"].split()))


def main() -> None:
    """Print the table, and write it."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("steps", type=Path, help="CSV of scaling_gpus.py")
    parser.add_argument("collectives", type=Path, help="CSV of collectives.py")
    parser.add_argument("--out", type=Path)
    args = parser.parse_args()
    lines = check(read_csv(args.steps), read_csv(args.collectives))
    cells = [
        [
            *(str(line[name]) for name in ("model", "layers", "gpus", "sharing", "unique_tokens_per_rank")),
            f"{line['measured_s']:.3f}",
            f"{line['predicted_s']:.3f}",
            f"{line['error']:+.1%}",
        ]
        for line in lines
    ]
    print(format_table(HEADER, cells))
    print("\n".join(verdicts(lines)))
    if args.out:
        write_csv(args.out, lines)


if __name__ == "__main__":
    main()
