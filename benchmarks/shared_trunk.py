"""One tree with a long trunk whose tokens GPUs share: forward and backward against one GPU with the full weights.

for run in "1 1" "4 4"; do   # GPUs, how many share the tokens
    set -- $run
    torchrun --standalone --nproc-per-node $1 benchmarks/shared_trunk.py --sp $2 --trunk 131072 262144
done
python benchmarks/shared_trunk.py --report docs/benchmarks/shared_trunk.csv
"""

import argparse
import statistics
import sys
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed

sys.path.insert(0, str(Path(__file__).parent))

from deep_trunks import WARM_SHARE, trunk_batch
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
from many_gpus.verdicts import trunk_report

from tree_rl.benchmark.against_verl.engines import actor_loss
from tree_rl.benchmark.against_verl.worker_rows import rows_as_received, rows_to_update
from tree_rl.benchmark.batch import Batch
from tree_rl.benchmark.phases import UPDATE, Stopwatch, UpdateTimes
from tree_rl.benchmark.results import read_csv
from tree_rl.cost.model_sizes import MODEL_SIZES

POSITIONS = 1 << 20
"""Positions of the model: its longest row."""


def forward_backward(engine: Any, batch: Batch, vocab: int) -> tuple[UpdateTimes, dict[str, Any], float]:
    """One call without the optimizer: times, the engine's metrics, norm of the gradient of all ranks' shards."""
    data = rows_as_received(batch, max_tokens=sum(map(len, batch.rows)))
    old = [torch.full((len(row),), -float(np.log(vocab))) for row in batch.rows]
    data = rows_to_update(data, batch, torch.nested.as_nested_tensor(old, layout=torch.jagged))
    engine.optimizer_zero_grad()
    synchronized()
    clock = Stopwatch(torch.device(DEVICE))
    # verl forgets the gradients where the mode ends.
    with engine.train_mode(disable_auto_offload=True):
        with clock.phase(UPDATE):
            output = engine.forward_backward_batch(data, actor_loss())
        times = clock.stop()
        shards = (parameter.grad for parameter in engine.module.parameters() if parameter.grad is not None)
        squares = torch.stack([shard.to_local().float().square().sum() for shard in shards]).sum()
    torch.distributed.all_reduce(squares)
    return times, output["metrics"], float(squares.sqrt())


def measured(engine: Any, batch: Batch, vocab: int, steps: int) -> dict[str, Any]:
    """Columns of the CSV: seconds of the slowest rank, memory of the fullest."""
    runs = [forward_backward(engine, batch, vocab) for _ in range(steps)]
    seconds = [worst(times.seconds) for times, _, _ in runs]
    _, metrics, norm = runs[-1]
    return {
        "failed": "",
        "seconds": statistics.median(seconds),
        "steps_s": " ".join(f"{value:.5f}" for value in seconds),
        "partitions": round(metrics["tree/partitions"].aggregate()),
        "plan_s": metrics["tree/plan_seconds"].aggregate(),
        "out_of_memory": round(metrics["tree/out_of_memory"].aggregate()),
        "peak_gib": worst(max(times.peak_bytes for times, _, _ in runs)) / 2**30,
        "gradient_norm": norm,
    }


def measure(args: argparse.Namespace, rank: int, world: int) -> None:
    """All trunks on this number of GPUs; a CSV row after each."""
    if args.sp != world:
        raise SystemExit(
            f"--sp {args.sp}: expected the number of GPUs, {world}: one tree has no work for further ranks"
        )
    size = size_of(args.model, args.layers, positions=POSITIONS)
    vocab = size.shape.vocab
    engine = tree_engine(args, saved_model(args.model, size, args.scratch), max_tokens=args.max_tokens)
    setting = about(args, args.model, size, engine) | {"tree_max_tokens": args.max_tokens}
    for trunk in args.trunk:
        sizes = (trunk, args.branches, args.branch_tokens)
        small = [max(2, tokens // WARM_SHARE) for tokens in (trunk, args.branch_tokens)]
        batch = trunk_batch(*sizes, vocab)
        row: dict[str, Any] = dict(zip(("trunk", "branches", "branch_tokens"), sizes, strict=True))
        row["unique_tokens"] = batch.forest().num_unique
        try:
            forward_backward(engine, trunk_batch(small[0], args.branches, small[1], vocab), vocab)
            row |= measured(engine, batch, vocab, args.steps)
        except torch.OutOfMemoryError as error:
            if world > 1:
                raise
            row["failed"] = type(error).__name__
        append(args.out, row, setting)


def main() -> None:
    """Measure as one rank of torchrun, or report."""
    options = parser(__doc__, "docs/benchmarks/shared_trunk.csv")
    options.add_argument("--model", choices=tuple(MODEL_SIZES), default="8b")
    options.add_argument("--trunk", type=int, nargs="+", default=[131_072], help="tokens of the shared prompt")
    options.add_argument("--branches", type=int, default=16)
    options.add_argument("--branch-tokens", type=int, default=8_192, help="tokens of an answer")
    options.add_argument("--max-tokens", type=int, help="tree.max_tokens, for partitions; default: whole trees")
    options.add_argument("--steps", type=int, default=2)
    args = options.parse_args()
    if args.report is not None:
        print(trunk_report(read_csv(args.report)))
        return
    run(args, measure, trunk_report)


if __name__ == "__main__":
    main()
