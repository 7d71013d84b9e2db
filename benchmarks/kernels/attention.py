"""Tree attention against rows run alone, plain causal attention and the matmul ceiling, behind a gate, as a CSV.

python benchmarks/kernels/attention.py --quick --out docs/benchmarks/attention.csv
Contenders are "tree IMPL" (this op), "paths IMPL" (every row alone, packed without padding: the strongest that a
trainer of rows can do) and "causal IMPL" (one row of as many tokens, and one of as many operations).
"""

import random
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import product
from math import sqrt
from pathlib import Path
from typing import Any

import numpy as np
import torch

sys.path.insert(0, str(Path(__file__).parent))
from forest_shapes import SHAPES
from kernel_runs import (
    GateError,
    Timer,
    device_and_dtype,
    parser,
    passes,
    printed_reasons,
    require_exact,
    spread_columns,
    time_cells,
)

from tree_kernels import TreeLayout, tree_attention
from tree_kernels.tree_attention.api import unavailable_reason
from tree_rl.benchmark.against_packed import packed_attention
from tree_rl.benchmark.against_packed.packed_attention import PackedLayout
from tree_rl.benchmark.provenance import provenance
from tree_rl.benchmark.results import Columns, Spread, collect_rows
from tree_rl.cost.cost_model import ModelShape
from tree_rl.cost.model_sizes import MODEL_SIZES, full_name
from tree_rl.inspection.text import format_table
from tree_rl.tree import Forest, measure_forest

LIMIT = {torch.bfloat16: 2.0**-8, torch.float16: 2.0**-11, torch.float32: 1e-5}
"""Largest relative error (norm). Half precision: the distance of neighbouring numbers. Inputs are exact, and rounding
the probabilities and the result costs about half of that; an error in the mask costs far more."""
DEFAULT = {
    "cuda": ("tree fa4", "tree triton", "tree flex", "paths fa4", "paths cudnn", "paths fa2", "causal fa4"),
    "cpu": ("tree sdpa", "paths sdpa", "causal sdpa"),
}
"""Contenders of a device unless others are named."""
TOKENS = (8_192, 32_768, 65_536)
MOST_TOKENS = 300_000
"""Rows beyond are timed as an evenly spaced sample, scaled by visible pairs."""
MOST_CALLS = 64
"""Rows of a contender that calls its kernel once per row, beyond which a sample is timed as well."""
BLOCK = 128
GATE_TOKENS = 4_000
MATMUL = 8192
BACKWARD_FACTOR = 2.5
"""A backward of attention has five products where the forward has two."""
HEADER = ("shape", "heads", "tokens", "contender", "ms fwd", "ms f+b", "range", "TF fwd", "TF f+b", "speed-up", "ideal")


LLAMA = ModelShape(hidden=2048, layers=16, intermediate=8192, heads=32, kv_heads=8, head_dim=64, vocab=128_256)
SIZES = {"tiny": MODEL_SIZES["tiny"].shape, "llama-3.2-1b": LLAMA}
SIZES |= {full_name(key): size.shape for key, size in MODEL_SIZES.items()}
"""Models with the heads to measure."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Contender:
    """One way to run the attention of a forest."""

    name: str
    """Name in the table."""
    tokens: int
    """Tokens of q, k and v."""
    pairs: int
    """Visible pairs that it computes."""
    scale: float
    """Its time stands for so many times its pairs; 1 unless only a sample of the rows runs."""
    run: Callable[..., Any]
    """(q, k, v) [tokens, heads, D] to output."""
    subtree_end: torch.Tensor
    """int32 [tokens], the mask as the reference reads it."""


def contenders_named(
    name: str, forest: Forest, device: torch.device, *, most_tokens: int = MOST_TOKENS
) -> list[Contender]:
    """The contenders of a forest behind one name of `DEFAULT`; of longer rows "paths" runs a sample."""
    kind, impl = name.split()
    if kind == "tree":
        layout = TreeLayout.from_subtree_end(torch.from_numpy(forest.subtree_end)).to(device)
        run = partial(tree_attention, layout=layout, impl=impl)
        sizes = {"tokens": forest.num_unique, "pairs": forest.num_pairs}
        return [Contender(name=name, scale=1.0, run=run, subtree_end=layout.subtree_end, **sizes)]
    if kind == "paths":
        lengths = forest.row_index.lengths
        most_rows = MOST_CALLS if impl in ("cudnn", "flash", "sdpa") else len(lengths)
        return [packed(name, impl, sample(lengths, most_tokens, most_rows), device, pairs=pairs_of_rows(lengths))]
    equal = max(BLOCK, round(sqrt(2 * forest.num_pairs) / BLOCK) * BLOCK)
    rows = {"equal tokens": forest.num_unique, "equal operations": equal}
    return [packed(f"{name}, {what}", impl, np.array([size]), device) for what, size in rows.items()]


def packed(name: str, impl: str, lengths: np.ndarray, device: torch.device, *, pairs: int | None = None) -> Contender:
    """Rows end to end, which stand for rows of so many visible pairs."""
    layout = PackedLayout(lengths.tolist(), device)
    return Contender(
        name=name,
        tokens=int(lengths.sum()),
        pairs=pairs_of_rows(lengths),
        scale=1.0 if pairs is None else pairs / pairs_of_rows(lengths),
        run=partial(packed_attention.packed_attention, layout=layout, impl=impl),
        subtree_end=layout.rows_apart.subtree_end,
    )


def pairs_of_rows(lengths: np.ndarray) -> int:
    """Visible pairs of rows run alone."""
    sizes = lengths.astype(np.int64)
    return int((sizes * (sizes + 1) // 2).sum())


def sample(lengths: np.ndarray, most_tokens: int, most_rows: int) -> np.ndarray:
    """Lengths of evenly spaced rows: all of them where they fit."""
    share = min(1.0, most_tokens / lengths.sum(), most_rows / len(lengths))
    count = max(1, int(len(lengths) * share))
    return lengths[np.unique(np.linspace(0, len(lengths) - 1, count).round().astype(int))]


def reason_against(name: str, device: torch.device, dtype: torch.dtype, heads: ModelShape) -> str | None:
    """Why a contender cannot run, or None."""
    kind, impl = name.split()
    reason_of = unavailable_reason if kind == "tree" else packed_attention.unavailable_reason
    return reason_of(impl, device=device, dtype=dtype, head_size=heads.head_dim, value_size=heads.value_size)


def check(contender: Contender, heads: ModelShape, dtype: torch.dtype) -> float:
    """Largest relative error of output and gradients on a small forest: the reference holds all scores.

    Raises:
        GateError: it is beyond `LIMIT`.
    """
    leaves, grad = inputs_of(contender.tokens, heads, dtype, contender.subtree_end.device)
    exact = [leaf.detach().float().requires_grad_() for leaf in leaves]
    out = contender.run(*leaves)
    truth: Any = tree_attention(*exact, contender.subtree_end, impl="reference")
    got = [out, *torch.autograd.grad(out, leaves, grad)]
    true = [truth, *torch.autograd.grad(truth, exact, grad.float())]
    return require_exact(contender.name, ("out", "dq", "dk", "dv"), got, true, LIMIT[dtype])


def inputs_of(
    tokens: int, heads: ModelShape, dtype: torch.dtype, device: torch.device
) -> tuple[list[torch.Tensor], torch.Tensor]:
    """Normal q [N, H, D], k and v as leaves, and a gradient of the output."""
    torch.manual_seed(0)
    size, value_size = heads.head_dim, heads.value_size
    shapes = ((heads.heads, size), (heads.kv_heads, size), (heads.kv_heads, value_size), (heads.heads, value_size))
    q, k, v, grad = (torch.randn(tokens, *shape, dtype=dtype, device=device) for shape in shapes)
    return [t.requires_grad_() for t in (q, k, v)], grad


def measure(
    shape: str,
    tokens: int,
    layout: str,
    names: Sequence[str],
    timer: Timer,
    *,
    rounds: int,
    dtype: torch.dtype,
    device: torch.device,
) -> Iterator[Columns]:
    """Rows of the CSV of one forest: gate, then forward alone, then forward and backward, contenders in turns."""
    heads = SIZES[layout]
    forest = SHAPES[shape](tokens).forest()
    small = SHAPES[shape](min(tokens, GATE_TOKENS)).forest()
    overlap = measure_forest(forest)
    about: Columns = {
        "shape": shape,
        "heads": layout,
        "unique_tokens": overlap.unique_tokens,
        "flat_tokens": overlap.flat_tokens,
        "rows": overlap.paths,
        "segments": forest.num_segments,
        "unique_pairs": overlap.unique_pairs,
        "flat_pairs": overlap.flat_pairs,
    }
    passed: list[tuple[Columns, Contender]] = []
    for name in names:
        reason = reason_against(name, device, dtype, heads)
        if reason is not None:
            yield about | {"contender": name, "not_run": reason}
            continue
        # The reference holds all scores, so that of a tree's rows only as many as the tree has tokens fit.
        gated = contenders_named(name, small, device, most_tokens=small.num_unique)
        for contender, small_one in zip(contenders_named(name, forest, device), gated, strict=True):
            try:
                error = check(small_one, heads, dtype)
            except GateError as wrong:
                yield about | {"contender": contender.name, "not_run": f"gate: {wrong}"}
            else:
                passed.append((about | {"contender": contender.name, "gate_error": error}, contender))
    times: list[dict[str, list[float]]] = [{} for _ in passed]
    for number in range(rounds):
        # A GPU's clock falls under load, so a fixed order would favour whoever follows the lightest.
        for place in random.Random(number).sample(range(len(passed)), len(passed)):
            contender = passed[place][1]
            leaves, grad = inputs_of(contender.tokens, heads, dtype, device)
            for name, run in passes(contender.run, leaves, grad).items():
                times[place].setdefault(name, []).append(timer.one_group(run))
    for (row, contender), found in zip(passed, times, strict=True):
        yield row | columns(contender, heads, found)


def columns(contender: Contender, heads: ModelShape, times: Mapping[str, Sequence[float]]) -> Columns:
    """Milliseconds over the rounds and TFLOP/s on visible pairs."""
    flops = 2.0 * contender.pairs * heads.heads * (heads.head_dim + heads.value_size)
    found: Columns = {"measured_tokens": contender.tokens, "sample_scaled_by": contender.scale}
    for name, factor in (("forward", 1.0), ("total", 1 + BACKWARD_FACTOR)):
        spread = Spread.of(times[name])
        found |= spread_columns(name, spread, contender.scale)
        found[f"{name}_tflops"] = flops * factor / spread.median / 1e9
    return found


def matmul_ceiling(timer: Timer, dtype: torch.dtype, device: torch.device) -> Columns:
    """The rate of one large product."""
    size = MATMUL if device.type == "cuda" else 256
    a, b = (torch.randn(size, size, dtype=dtype, device=device) for _ in range(2))
    spread = timer.milliseconds(lambda: a @ b)
    rate = 2.0 * size**3 / spread.median / 1e9
    print(f"matmul {size}: {rate:.3g} TFLOP/s", flush=True)
    return {"contender": f"matmul {size}", **spread_columns("forward", spread), "forward_tflops": rate}


def summarise(rows: Sequence[Columns]) -> str:
    """One line per contender that ran; speed-ups are over the fastest run of the rows alone."""
    cases: dict[tuple[Any, ...], list[dict[str, Any]]] = {}
    for row in rows:
        if "total_ms" in row:
            cases.setdefault((row["shape"], row["heads"], row["unique_tokens"]), []).append(row)
    lines = []
    for (shape, heads, tokens), members in cases.items():
        paths = min((row["total_ms"] for row in members if row["contender"].startswith("paths")), default=None)
        for row in members:
            name = row["contender"] + (" (sample)" if row["sample_scaled_by"] != 1 else "")
            rates = [f"{row[f'{pass_}_tflops']:.3g}" for pass_ in ("forward", "total")]
            speeds = ("", "")
            if name.startswith("tree"):
                speed_up = "" if paths is None else f"{paths / row['total_ms']:.2f}"
                speeds = (speed_up, f"{row['flat_pairs'] / row['unique_pairs']:.2f}")
            lines.append((shape, heads, f"{tokens:,}", name, *time_cells(row), *rates, *speeds))
    return format_table(HEADER, lines)


def main() -> None:
    """Measure, print a summary, write the CSV after every row."""
    options = parser(__doc__, group_seconds=0.06)
    options.add_argument("--quick", action="store_true", help="32,768 tokens alone")
    options.add_argument("--shapes", nargs="+", choices=SHAPES, default=list(SHAPES))
    options.add_argument("--heads", nargs="+", choices=SIZES, default=["qwen3-8b"])
    options.add_argument("--tokens", nargs="+", type=int, help=f"default {TOKENS}")
    options.add_argument("--contenders", nargs="+", help="such as 'tree fa4' 'paths cudnn' 'causal fa4'; default all")
    options.add_argument("--rounds", type=int, default=3, help="groups of each contender, in turns")
    args = options.parse_args()
    device, dtype = device_and_dtype(args)
    timer = Timer(device, group_seconds=args.group_seconds)
    run = partial(
        measure,
        names=args.contenders or DEFAULT[device.type],
        timer=timer,
        rounds=args.rounds,
        dtype=dtype,
        device=device,
    )

    def measured() -> Iterator[Columns]:
        yield matmul_ceiling(timer, dtype, device)
        sizes = args.tokens or ((32_768,) if args.quick else TOKENS)
        for layout, tokens, shape in product(args.heads, sizes, args.shapes):
            yield from printed_reasons(run(shape, tokens, layout))

    about = provenance(commit=args.commit) | {"dtype": str(dtype).removeprefix("torch.")}
    print(summarise(collect_rows(measured(), about, args.out)))


if __name__ == "__main__":
    main()
