"""Tree attention against rows run alone, plain causal attention and the matmul ceiling, behind a gate, as a CSV.

python benchmarks/kernels/attention --quick --out docs/benchmarks/attention.csv
"""

import argparse
import random
from collections.abc import Iterator, Sequence
from pathlib import Path

import torch
from contenders import DEFAULT, Contender, contenders_named, passes, reason_against
from gate import GateError, check, inputs_of
from plan import Case, full_plan, quick_plan, registry
from shapes import HEAD_LAYOUTS, SHAPES, HeadLayout
from summary import summarise

from tree_rl.benchmark.provenance import provenance
from tree_rl.benchmark.results import Spread, write_csv
from tree_rl.benchmark.timing import Timer
from tree_rl.tree import measure_forest

GATE_TOKENS = 4_000
MATMUL = 8192
BACKWARD_FACTOR = 2.5
"""A backward of attention has five products where the forward has two."""

Times = dict[str, list[float]]
"""Milliseconds of each round, by pass."""


def measure(
    case: Case, names: Sequence[str], timer: Timer, dtype: torch.dtype, device: torch.device, rounds: int
) -> Iterator[dict]:
    """Rows of the CSV of one case: gate, then forward alone, then forward and backward, contenders in turns."""
    heads = HEAD_LAYOUTS[case.heads]
    forest = SHAPES[case.shape](case.tokens).forest()
    small = SHAPES[case.shape](min(case.tokens, GATE_TOKENS)).forest()
    overlap = measure_forest(forest)
    about = {
        "shape": case.shape,
        "heads": case.heads,
        "unique_tokens": overlap.unique_tokens,
        "flat_tokens": overlap.flat_tokens,
        "rows": overlap.paths,
        "segments": forest.num_segments,
        "unique_pairs": overlap.unique_pairs,
        "flat_pairs": overlap.flat_pairs,
    }
    passed: list[tuple[dict[str, object], Contender]] = []
    for name in names:
        reason = reason_against(name, device, dtype, heads)
        if reason is not None:
            yield about | {"contender": name, "not_run": reason}
            continue
        # The reference holds all scores, so that of a tree's rows only as many as the tree has tokens fit.
        gated = contenders_named(name, small, device, most_tokens=small.num_unique)
        pairs = zip(contenders_named(name, forest, device), gated, strict=True)
        for contender, small_contender in pairs:
            try:
                errors = check(small_contender, heads, dtype)
            except GateError as error:
                yield about | {"contender": contender.name, "not_run": f"gate: {error}"}
                continue
            passed.append((about | {"contender": contender.name, "gate_error": errors.largest}, contender))
    times: list[Times] = [{} for _ in passed]
    for number in range(rounds):
        # A GPU's clock falls under load, so a fixed order would favour whoever follows the lightest.
        for place in random.Random(number).sample(range(len(passed)), len(passed)):
            add_times(times[place], passed[place][1], heads, timer, dtype, device)
    for (row, contender), found in zip(passed, times, strict=True):
        yield row | columns(contender, heads, found)


def add_times(
    times: Times, contender: Contender, heads: HeadLayout, timer: Timer, dtype: torch.dtype, device: torch.device
) -> None:
    """Add one round's milliseconds of each pass."""
    leaves, grad = inputs_of(contender.tokens, heads, dtype, device)
    for name, run in passes(contender, leaves, grad).items():
        times.setdefault(name, []).append(timer.one_group(run))


def columns(contender: Contender, heads: HeadLayout, times: Times) -> dict[str, object]:
    """Columns of one contender: milliseconds over the rounds and TFLOP/s on visible pairs."""
    flops = 4.0 * contender.pairs * heads.heads * heads.head_size
    found: dict[str, object] = {"measured_tokens": contender.tokens, "sample_scaled_by": contender.scale}
    for name, factor in (("forward", 1.0), ("total", 1 + BACKWARD_FACTOR)):
        spread = Spread.of(times[name])
        found[f"{name}_ms"] = spread.median * contender.scale
        found[f"{name}_ms_low"] = spread.low * contender.scale
        found[f"{name}_ms_high"] = spread.high * contender.scale
        found[f"{name}_tflops"] = flops * factor / spread.median / 1e9
    return found


def matmul_ceiling(timer: Timer, dtype: torch.dtype, device: torch.device, size: int) -> dict[str, object]:
    """The rate of one large product."""
    a, b = (torch.randn(size, size, dtype=dtype, device=device) for _ in range(2))
    spread = timer.milliseconds(lambda: a @ b)
    return {
        "contender": f"matmul {size}",
        "forward_ms": spread.median,
        "forward_ms_low": spread.low,
        "forward_ms_high": spread.high,
        "forward_tflops": 2.0 * size**3 / spread.median / 1e9,
    }


def options() -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    extent = parser.add_mutually_exclusive_group()
    extent.add_argument("--quick", action="store_true", help="about a minute on an H200 instead of five")
    extent.add_argument("--every", action="store_true", help="the whole registry: 240 cases, 8k to 128k tokens")
    parser.add_argument("--shapes", nargs="+", choices=SHAPES, help="only these")
    parser.add_argument("--heads", nargs="+", choices=HEAD_LAYOUTS, help="only these")
    parser.add_argument("--tokens", nargs="+", type=int, help="only these sizes")
    parser.add_argument("--contenders", nargs="+", help="such as 'tree fa4' 'paths cudnn' 'causal fa4'; default all")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument(
        "--dtype", choices=("bfloat16", "float16", "float32"), help="default bfloat16, float32 on a CPU"
    )
    parser.add_argument("--group-seconds", type=float, default=0.06, help="length of a group of repeats")
    parser.add_argument("--rounds", type=int, default=3, help="groups of each contender, in turns")
    parser.add_argument("--commit", help="outside a git checkout")
    parser.add_argument("--out", type=Path, help="CSV to write")
    args = parser.parse_args()
    if args.rounds < 1:
        parser.error(f"--rounds {args.rounds}: expected at least 1")
    return args


def main() -> None:
    """Measure, print a line per contender and a summary, write the CSV."""
    args = options()
    device = torch.device(args.device)
    dtype = getattr(torch, args.dtype or ("bfloat16" if device.type == "cuda" else "float32"))
    names = args.contenders or DEFAULT[device.type]
    about = provenance(commit=args.commit) | {"dtype": str(dtype).removeprefix("torch.")}
    timer = Timer(device, group_seconds=args.group_seconds)
    rows = [matmul_ceiling(timer, dtype, device, MATMUL if device.type == "cuda" else 256) | about]
    reasons_shown = set()
    plan = quick_plan if args.quick else registry if args.every else full_plan
    for case in plan(shapes=args.shapes, heads=args.heads, tokens=args.tokens):
        for row in measure(case, names, timer, dtype, device, args.rounds):
            rows.append(row | about)
            if "not_run" in row and row["not_run"] not in reasons_shown:
                reasons_shown.add(row["not_run"])
                print(f"{row['contender']} on {case.shape}, {case.heads}: not run, {row['not_run']}", flush=True)
            if args.out is not None:
                write_csv(args.out, rows)
    print(summarise(rows))


if __name__ == "__main__":
    main()
