"""Weak scaling of a whole update through verl's FSDP2 and the tree engine: 1, 2, 4 GPUs at equal work per GPU.

    for gpus in 1 2 4 1 2 4; do
        torchrun --nproc-per-node $gpus benchmarks/scaling_gpus.py --model 0.6b 8b --out scaling.csv \\
            --data examples/tau_bench_airline/trajectories.json --tokenizer outputs/qwen_tokenizer
    done
    python benchmarks/scaling_gpus.py --report scaling.csv

A step is what the trainer asks of a worker: old log-probs, then forward, backward and optimizer of each mini-batch.
Every rank gets the same trees with other token ids (`equal`), or all trees are shared out as by the trainer
(`balanced`) or as whole groups (`whole_groups`); the mean work per GPU is the same in all of them and on one GPU.
"""

import argparse
import itertools
import statistics
import sys
from collections.abc import Sequence
from pathlib import Path

import torch
import torch.distributed

sys.path.insert(0, str(Path(__file__).parent))

from many_gpus.ranks import (
    DEVICE,
    about,
    append,
    parser,
    run,
    saved_model,
    size_of,
    synchronized,
    tree_engine,
    worst,
)
from many_gpus.shares import (
    ARMS,
    BALANCED,
    EQUAL,
    RECORDED,
    Share,
    drawn_trees,
    recorded_trees,
    share_of,
)
from many_gpus.verdicts import scaling_report

from tree_rl.benchmark.against_verl.verl_updates import Side, update
from tree_rl.benchmark.batch import Batch
from tree_rl.benchmark.phases import OLD_LOG_PROBS, UPDATE, UpdateTimes
from tree_rl.benchmark.results import read_csv
from tree_rl.cost.model_sizes import MODEL_SIZES
from tree_rl.inspection.row_file import read_row_file

GRPO = "grpo"
WARM_UPDATES = 5
"""Updates before the cost model's predictions count."""


def timed_steps(
    side: Side, errors: list[float | None], cells: Sequence[Batch], steps: int
) -> tuple[list[float], list[UpdateTimes]]:
    """Seconds of each step on the slowest rank, and this rank's times; one more step before warms up.

    `errors` gets `tree/cost_error` behind each update; None where nothing was predicted yet.
    """
    seconds, times = [], []
    for index in range(steps + 1):
        synchronized()
        spent = update(side, *cells, then=lambda: errors.append(side.engine.step.learner.calls.error))
        slowest = worst(spent.seconds)
        if index:
            seconds.append(slowest)
            times.append(spent)
    return seconds, times


def measure(args: argparse.Namespace, rank: int, world: int) -> None:
    """All models on this number of GPUs."""
    for model in args.model:
        measure_model(args, model, rank, world)


def measure_model(args: argparse.Namespace, model: str, rank: int, world: int) -> None:
    """All shapes and arms of one model; a CSV row after each."""
    size = size_of(model, args.layers)
    engine = tree_engine(args, saved_model(model, size, args.scratch))
    side, errors = Side(engine=engine, max_tokens=args.max_tokens), list[float | None]()
    setting = about(args, model, size, engine) | {"mini_batches": args.mini_batches, "max_tokens": args.max_tokens}
    place = {"rank": rank // args.sp, "world": world // args.sp, "shape": size.shape, "mini_batches": args.mini_batches}
    for shape, tokens in itertools.product(args.shapes, args.tokens):
        if shape == GRPO:
            one = drawn_trees(tokens, args.row_tokens, size.shape.vocab)
        else:
            one = recorded_trees(read_row_file(args.data, tokenizer=args.tokenizer), tokens, size.shape.vocab)
        for arm in args.arms if world > 1 else [EQUAL]:
            row = {"shape": shape, "arm": arm, "trees_per_gpu": len(set(one.groups))}
            append(args.out, row | measure_arm(side, errors, share_of(one, arm, **place), args.steps), setting)


def measure_arm(side: Side, errors: list[float | None], share: Share, steps: int) -> dict[str, object]:
    """Columns of the CSV: seconds of the slowest rank; phases are those of rank 0."""
    seconds, times = timed_steps(side, errors, share.cells, steps)
    predicted = [error for error in errors[WARM_UPDATES:] if error is not None]
    tokens = torch.tensor([share.unique_tokens], device=DEVICE)
    torch.distributed.all_reduce(tokens)
    return {
        "unique_tokens_per_rank": int(tokens) // torch.distributed.get_world_size(),
        "operations": worst(share.operations),
        "unique_tokens_most": int(worst(share.unique_tokens)),
        "imbalance": share.imbalance,
        "step_s": statistics.median(seconds),
        "old_log_probs_s": statistics.median(spent.phases[OLD_LOG_PROBS] for spent in times),
        "update_s": statistics.median(spent.phases[UPDATE] for spent in times),
        "steps_s": " ".join(f"{value:.5f}" for value in seconds),
        "updates": len(errors),
        "cost_error": statistics.median(predicted) if predicted else None,
        "dummy_ops_rank0": side.engine.step.dummy_ops,
        "peak_gib": worst(max(spent.peak_bytes for spent in times)) / 2**30,
    }


def main() -> None:
    """Measure as one rank of torchrun, or report."""
    options = parser(__doc__, "docs/benchmarks/scaling.csv")
    options.add_argument("--model", nargs="+", choices=tuple(MODEL_SIZES), default=["0.6b"])
    options.add_argument("--shapes", nargs="+", choices=(RECORDED, GRPO), default=[RECORDED, GRPO])
    options.add_argument("--arms", nargs="+", choices=ARMS, default=[EQUAL, BALANCED])
    options.add_argument("--data", type=Path, help="recorded rows, as for tree-rl bench")
    options.add_argument("--tokenizer", type=Path, help="for recorded messages")
    options.add_argument("--tokens", type=int, nargs="+", default=[65_536], help="unique tokens per GPU and step")
    options.add_argument("--row-tokens", type=int, default=8_192, help="of synthetic rows")
    options.add_argument("--max-tokens", type=int, default=98_304, help="unique tokens of one forward")
    options.add_argument("--mini-batches", type=int, default=1, help="optimizer steps of a step")
    options.add_argument("--steps", type=int, default=5)
    args = options.parse_args()
    if args.report is not None:
        print(scaling_report(read_csv(args.report)))
        return
    if RECORDED in args.shapes and args.data is None:
        options.error("--shapes recorded: expected --data, received none; name recorded rows or leave the shape out")
    run(args, measure, scaling_report)


if __name__ == "__main__":
    main()
