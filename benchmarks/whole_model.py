"""Whole updates of a whole model on several GPUs: trees against rows, on random weights.

    PYTHONPATH=.:kernels python benchmarks/whole_model.py 32b --gpus 8 --por 0.5 0.7 0.85 0.92
    PYTHONPATH=.:kernels python benchmarks/whole_model.py qwen3-30b-a3b --gpus 8 --por 0.92 --rows-per call \\
        --data examples/tau_bench_airline/trajectories.json --tokenizer outputs/qwen_tokenizer
    PYTHONPATH=.:kernels python benchmarks/whole_model.py 32b --gpus 8 --por 0.5 0.85 --partitions 0.5 0.25
    PYTHONPATH=.:kernels python benchmarks/whole_model.py 32b --gpus 8 --por 0.92 --loss sft
    PYTHONPATH=.:kernels python benchmarks/whole_model.py 32b --gpus 8 --layers 8 --por 0.85 --curve-steps 100

All arms run on one set of weights, sharded by verl's FSDP2 engine, in turns. Before anything is timed their gradients
are held against those of stock verl's rows in float32. A step is old log-probs (PPO), forward, backward and AdamW;
`tree_on_policy` takes old log-probs from the update's own forward. Rows of one `--out` add up; overlaps become a figure
beside it.
"""

import argparse
import os
import statistics
import sys
import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import replace
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed

REPOSITORY = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(REPOSITORY / "benchmarks")]
from many_gpus.device_time import device_time  # noqa: E402
from many_gpus.ranks import DEVICE, full_name, join_ranks, synchronized, worst  # noqa: E402
from whole_models import curves, gate, random_engine  # noqa: E402
from whole_models.arms import ON_POLICY, PACKED, PPO, SFT, STOCK, TREE, Arm, arms_of, run_step  # noqa: E402
from whole_models.figure import draw_sweep  # noqa: E402
from whole_models.table import format_results  # noqa: E402

from tree_rl.benchmark.against_verl import without_flash_attention_2 as without  # noqa: E402
from tree_rl.benchmark.against_verl.engines import MAX_TOKENS as STOCK_MAX_TOKENS  # noqa: E402
from tree_rl.benchmark.batch import (  # noqa: E402
    Batch,
    agent_batch,
    recorded_batch,
    recorded_batches,
)
from tree_rl.benchmark.figure import draw_deviation  # noqa: E402
from tree_rl.benchmark.model_sizes import MODEL_SIZES, ModelSize  # noqa: E402
from tree_rl.benchmark.phases import OLD_LOG_PROBS, UPDATE, UpdateTimes  # noqa: E402
from tree_rl.benchmark.provenance import PACKAGES, provenance  # noqa: E402
from tree_rl.benchmark.results import Columns, Spread, read_csv, write_csv  # noqa: E402
from tree_rl.commands.row_options import read_rows  # noqa: E402
from tree_rl.inspection.chat_rows import RowsPer  # noqa: E402
from tree_rl.inspection.overlap_by_group import rows_by_group  # noqa: E402
from tree_rl.inspection.row import Row  # noqa: E402
from tree_rl.models.fused_layers import has_liger  # noqa: E402

GATE_MEMORY = 0.6
"""Share of the GPUs' memory that weights, gradients and moments may take; activations need the rest."""


def parse(given: Sequence[str] | None = None) -> argparse.Namespace:
    """The command line.

    Raises:
        SystemExit: a wrong value, named.
    """
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", choices=sorted(MODEL_SIZES))
    parser.add_argument("--gpus", type=int, default=1, help="processes of this machine; on a CPU they talk by gloo")
    parser.add_argument("--layers", type=int, help="fewer decoder layers than the model has")
    parser.add_argument("--offload", action="store_true", help="weights and moments in host memory (offload_policy)")
    parser.add_argument("--fused-adamw", action="store_true", help="one kernel in all arms, where verl takes several")
    parser.add_argument("--por", type=float, nargs="+", help="overlaps to draw, or to look for in --data")
    parser.add_argument("--data", type=Path, help="recorded rows; without --por, groups in random order")
    parser.add_argument("--tokenizer", type=Path, help="for recorded messages")
    parser.add_argument("--rows-per", type=RowsPer, choices=list(RowsPer), default=RowsPer.CALL)
    parser.add_argument("--flat-tokens", type=int, default=131_072, help="tokens of rows a GPU and step")
    parser.add_argument("--num-rows", type=int, default=16, help="of a drawn group")
    parser.add_argument("--row-tokens", type=int, default=8_192, help="of a drawn row")
    parser.add_argument("--max-tokens", type=int, default=32_768, help="of one forward, all arms but stock verl")
    parser.add_argument("--stock-max-tokens", type=int, default=STOCK_MAX_TOKENS, help="of one forward of stock verl")
    parser.add_argument("--arms", nargs="+", choices=(TREE, ON_POLICY, PACKED, STOCK), default=[TREE, PACKED, STOCK])
    parser.add_argument("--partitions", type=float, nargs="+", default=[], help="budgets as shares of the largest tree")
    parser.add_argument("--loss", choices=(PPO, SFT), default=PPO)
    parser.add_argument("--repeats", type=int, default=2, help="timed steps of each arm; one more warms up")
    parser.add_argument("--curve-steps", type=int, default=0, help="compare the losses of this many steps instead")
    parser.add_argument("--learning-rate", type=float, default=1e-6)
    parser.add_argument("--flat-attention", default="auto", help="of transformers, for stock verl's rows")
    parser.add_argument("--no-liger", action="store_true", help="transformers' layers in all arms")
    parser.add_argument("--scratch", type=Path, default=Path(tempfile.gettempdir()))
    parser.add_argument("--commit")
    parser.add_argument("--out", type=Path, default=Path("docs/benchmarks/whole_model.csv"))
    args = parser.parse_args(given)
    if args.data is None and not args.por:
        parser.error("--por: expected overlaps to draw, or --data with recorded rows; received neither")
    if not all(0 < share < 1 for share in args.partitions):
        parser.error(f"--partitions: expected shares between 0 and 1, received {args.partitions}")
    for name in ("gpus", "flat_tokens", "num_rows", "row_tokens", "max_tokens", "stock_max_tokens", "repeats"):
        if getattr(args, name) < 1:
            parser.error(f"--{name.replace('_', '-')}: expected at least 1, received {getattr(args, name)}")
    if STOCK not in args.arms and not args.curve_steps:
        parser.error(f"--arms: expected {STOCK} among them, whose float32 gradients are the yardstick")
    return args


def batches_of(args: argparse.Namespace, size: ModelSize, count: int) -> list[Batch]:
    """One batch of all GPUs for each overlap, or `count` batches of the first; recorded ids are taken modulo V."""
    flat_tokens, vocab = args.flat_tokens * args.gpus, size.shape.vocab
    if args.data is None:
        groups = max(1, round(flat_tokens / (args.num_rows * args.row_tokens)))
        draw = partial(agent_batch, num_rows=args.num_rows, row_tokens=args.row_tokens, num_groups=groups)
        chosen = [(por, seed) for por in (args.por if count == 1 else args.por[:1]) for seed in range(count)]
        return [draw(por=por, trained_share=0.3, vocab=vocab, seed=seed) for por, seed in chosen]
    rows = read_rows(args.data, args.tokenizer, args.rows_per, None, None)
    if any(row.trained is None for row in rows):
        raise SystemExit(f"--data {args.data}: expected rows with a mask of trained tokens")
    name = f"{args.data.stem}, one row per {args.rows_per}"
    if args.por:
        take = partial(recorded_batches, rows, name=name, flat_tokens=flat_tokens, max_tokens=sys.maxsize, count=count)
        found = [batch for por in args.por for batch in take(por=por)]
    else:
        found = [recorded_batch(drawn_groups(rows, flat_tokens, seed), name=name, seed=seed) for seed in range(count)]
    return [replace(batch, rows=tuple(row % vocab for row in batch.rows)) for batch in found]


def drawn_groups(rows: Sequence[Row], flat_tokens: int, seed: int) -> list[Row]:
    """Whole groups of a recording in random order, up to the one that reaches `flat_tokens`."""
    groups = list(rows_by_group(row.group for row in rows).values())
    chosen: list[Row] = []
    for index in np.random.default_rng(seed).permutation(len(groups)):
        if sum(len(row.token_ids) for row in chosen) < flat_tokens:
            chosen += [rows[row] for row in groups[index]]
    return chosen


def require_memory(args: argparse.Namespace, size: ModelSize) -> None:
    """Refuse a model whose weights, gradients and moments leave no room for activations.

    Raises:
        SystemExit: how many layers would fit.
    """
    if DEVICE == "cpu" or args.offload:
        return
    needed = random_engine.state_bytes(size)
    room = GATE_MEMORY * args.gpus * torch.cuda.get_device_properties(0).total_memory
    if needed > room:
        raise SystemExit(
            f"{args.model}, {size.shape.layers} layers: weights, gradients and moments take {needed / 2**30:.0f} GiB, "
            f"{room / 2**30:.0f} GiB are free for them on {args.gpus} GPUs; lower --layers to about "
            f"{int(size.shape.layers * room / needed)}, raise --gpus, or take --offload"
        )


def flat_attention(asked: str) -> str:
    """Attention of stock verl's rows: flash-attn-4 where it is installed, flash-attn 2 as verl's default, or SDPA."""
    if asked != "auto":
        chosen = asked
    elif DEVICE == "cpu":
        chosen = "sdpa"
    else:
        has_cute = find_spec("flash_attn") is not None and find_spec("flash_attn.cute") is not None
        chosen = without.NAME if has_cute else "flash_attention_2"
    if chosen == without.NAME:
        without.let_flash_attention_4_read_rows()
    return chosen


def timed_steps(engine: Any, arms: Sequence[Arm], args: argparse.Namespace, all_rows: int) -> dict[str, list[Any]]:
    """Times of each arm in turns, and seconds of the slowest rank; one more round before warms up."""
    found: dict[str, list[Any]] = {arm.name: [] for arm in arms}
    for turn in range(args.repeats + 1):
        for arm in arms:
            synchronized()
            spent = run_step(engine, arm, args.loss, all_rows=all_rows)
            slowest = worst(spent.seconds)
            if turn:
                found[arm.name].append((slowest, spent))
    return found


def measure(args: argparse.Namespace, size: ModelSize, rank: int) -> Iterator[Columns]:
    """A row of results for each batch; the gradients of the batch with the most overlap are checked first."""
    batches = batches_of(args, size, 1)
    attention = flat_attention(args.flat_attention)
    build = builder(args, size, attention)
    arms_here = partial(
        arms_of,
        shape=size.shape,
        names=args.arms,
        max_tokens=args.max_tokens,
        stock_max_tokens=args.stock_max_tokens,
        budget_shares=args.partitions,
        rank=rank,
        world=args.gpus,
    )
    thin = max(batches, key=lambda batch: batch.forest().por).for_gate()
    thinned = list(arms_here(thin))
    check = {"kind": args.loss, "all_rows": len(thin.rows)}
    truth = gate.exact_gradients(partial(build, is_exact=True), thinned, **check)
    engine = build(is_exact=False)
    errors = gate.check_arms(engine, thinned, truth, **check)
    del truth
    about = {
        "model": full_name(args.model),
        "layers": size.shape.layers,
        "gpus": args.gpus,
        "offload": args.offload,
        "adamw": "fused" if args.fused_adamw else "verl's default",
        "loss": args.loss,
        "max_tokens": args.max_tokens,
        "stock_max_tokens": args.stock_max_tokens,
        "tree_attention": engine.attention_implementation,
        "flat_attention": attention,
        "layer_kernels": "liger" if uses_liger(args) else "transformers",
    }
    for batch in batches:
        arms = list(arms_here(batch))
        times = timed_steps(engine, arms, args, len(batch.rows))
        row = columns(batch, size, times) | {f"{name}_gradient_error": error for name, error in errors.items()}
        for arm in arms:
            profiled = device_time(partial(run_step, engine, arm, args.loss, all_rows=len(batch.rows)))
            row[f"{arm.name}_imbalance"] = arm.share.imbalance
            row[f"{arm.name}_exposed_s"], row[f"{arm.name}_idle_s"] = profiled.exposed, profiled.idle
        yield row | about


def columns(batch: Batch, size: ModelSize, times: dict[str, list[tuple[float, UpdateTimes]]]) -> Columns:
    """Seconds of the slowest rank by arm, speed-ups of the trees, the bound; phases are those of this rank."""
    overlap = batch.overlap()
    bound = size.shape.flop_bound(overlap)
    row: Columns = {
        "batch": batch.name,
        "rows": len(batch.rows),
        "groups": len(set(batch.groups)),
        "por": overlap.por,
        "flat_tokens": overlap.flat_tokens,
        "unique_tokens": overlap.unique_tokens,
        "flop_bound": bound,
        "token_bound": overlap.token_bound,
    }
    spreads = {name: Spread.of([seconds for seconds, _ in found]) for name, found in times.items()}
    for name, found in times.items():
        spread = spreads[name]
        row |= {f"{name}_s": spread.median, f"{name}_s_low": spread.low, f"{name}_s_high": spread.high}
        for phase in (OLD_LOG_PROBS, UPDATE):
            row[f"{name}_{phase}_s"] = statistics.median(spent.phases.get(phase, 0.0) for _, spent in found)
        row[f"{name}_peak_gib"] = worst(max(spent.peak_bytes for _, spent in found)) / 2**30
    for name in times:
        for rival in (PACKED, STOCK):
            if rival in times and name not in (PACKED, STOCK):
                speed_up = spreads[rival].median / spreads[name].median
                row |= {f"{name}_over_{rival}": speed_up, f"{name}_over_{rival}_of_bound": speed_up / bound}
    return row


def compare_losses(args: argparse.Namespace, size: ModelSize, rank: int) -> list[Columns]:
    """Losses of `--curve-steps` steps."""
    rows = curves.loss_curves(
        partial(builder(args, size, "sdpa"), is_exact=False, learning_rate=args.learning_rate),
        batches_of(args, size, args.curve_steps),
        size.shape,
        steps=args.curve_steps,
        max_tokens=args.max_tokens,
        rank=rank,
        world=args.gpus,
    )
    about = {"model": args.model, "layers": size.shape.layers, "gpus": args.gpus, "learning_rate": args.learning_rate}
    return [row | about for row in rows]


def builder(
    args: argparse.Namespace, size: ModelSize, flat_attention: str
) -> partial[random_engine.RandomWeightsEngine]:
    """Builds engines of the model as the command line asks for them."""
    return partial(
        random_engine.build_engine,
        size,
        args.scratch / f"whole_model_{args.model}_{size.shape.layers}",
        flat_attention=flat_attention,
        liger=uses_liger(args),
        offload=args.offload,
        fused_adamw=args.fused_adamw,
    )


def uses_liger(args: argparse.Namespace) -> bool:
    """Whether all arms run Liger's layers: on a GPU where it is installed."""
    return DEVICE == "cuda" and has_liger() and not args.no_liger


def main() -> None:
    """Start one process a GPU; in each of them, measure."""
    args = parse()
    if "RANK" not in os.environ:
        launch = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(args.gpus)]
        os.execv(sys.executable, [sys.executable, *launch, __file__, *sys.argv[1:]])
    rank, _ = join_ranks()
    size = MODEL_SIZES[args.model].with_layers(args.layers)
    require_memory(args, size)
    origin = provenance(commit=args.commit, packages=(*PACKAGES, "verl"))
    with without.log_probs_in_one_pass() as log_probs:
        if args.curve_steps:
            rows = compare_losses(args, size, rank)
        else:
            rows = []
            for row in measure(args, size, rank):
                rows.append(row | {"verl_log_probs": log_probs})
                if rank == 0:
                    write_csv(args.out, [*read_csv(args.out), rows[-1] | origin])
    if rank == 0:
        figure = args.out.with_suffix(".png")
        if args.curve_steps:
            rows = [row | origin for row in rows]
            write_csv(args.out, rows)
            draw_deviation(rows, figure)
        else:
            draw_sweep(read_csv(args.out), figure)
        print(format_results(rows), flush=True)
    torch.distributed.destroy_process_group()


if __name__ == "__main__":
    main()
