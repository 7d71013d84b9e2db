"""The gated delta rule over trees against one linear sequence of the same tokens, behind a gate, as a CSV.

Contenders are "tree IMPL" (this op), "linear IMPL" and "linear fla" (the same number of tokens in one row), "rows IMPL"
and "rows fla" (every row alone, packed). fla is flash-linear-attention; where it does not import or refuses to run, its
lines say why.

python benchmarks/kernels/gated_delta_rule.py --out docs/benchmarks/gated_delta_rule.csv
Legend: N unique tokens, F tokens of rows laid end to end, H heads, K and V state sizes.
"""

import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
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

from tree_kernels import TreeLayout, tree_gated_delta_rule
from tree_kernels.tree_gated_delta_rule.api import IMPLEMENTATIONS, unavailable_reason
from tree_rl.benchmark.provenance import PACKAGES, provenance
from tree_rl.benchmark.results import Columns, collect_rows
from tree_rl.inspection.text import format_table
from tree_rl.tree import Forest

FLA = "fla"
REGISTRY = ("grpo", "stubs", "tiny", "chains", "causal")
"""16 answers to one prompt; a trunk with stubs; segments of 10 to 100 tokens; rows that share nothing; one row."""
GATE_TOKENS = 1_000
LIMIT = {torch.bfloat16: 1.2e-2, torch.float16: 1.5e-3, torch.float32: 2e-6}
"""Largest relative error (norm) of an output or a gradient against float64, as in test_recurrences_on_cuda.py."""
FLA_SLACK = 2
"""fla may be so much further off: its path sums of the gates are float32. A wrong product shows as an error of 1."""
NAMES = ("q", "k", "v", "g", "beta")
HEADER = ("shape", "tokens", "contender", "ms fwd", "ms f+b", "range", "of linear", "error")


@dataclass(frozen=True, kw_only=True, slots=True)
class Heads:
    """Heads of a model's Gated DeltaNet layers."""

    key_heads: int
    value_heads: int
    key_size: int
    value_size: int


HEADS = {
    "qwen3.5": Heads(key_heads=16, value_heads=32, key_size=128, value_size=128),
    "small": Heads(key_heads=2, value_heads=4, key_size=64, value_size=64),
    "tiny": Heads(key_heads=1, value_heads=2, key_size=16, value_size=16),
}

Run = Callable[..., torch.Tensor]
"""(q, k, v, g, beta) of the contender's tokens to outputs."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Contender:
    """One way to run the recurrence."""

    name: str
    tokens_of: np.ndarray
    """int64, the unique token that each of its tokens computes"""
    run: Run


def contender(name: str, forest: Forest, device: torch.device) -> Contender:
    """A contender of a forest by its name."""
    kind, impl = name.split()
    if kind == "tree":
        tokens_of, ends = np.arange(forest.num_unique), forest.subtree_end
        lengths = [forest.num_unique]
    else:
        rows = forest.row_index
        tokens_of = rows.values if kind == "rows" else np.arange(forest.num_unique)
        lengths = rows.lengths.tolist() if kind == "rows" else [forest.num_unique]
        ends = np.repeat(np.cumsum(lengths), lengths)
    if impl == FLA:
        return Contender(name=name, tokens_of=tokens_of, run=partial(_fla, _offsets(lengths, device)))
    layout = TreeLayout.from_subtree_end(torch.from_numpy(ends.astype(np.int32))).to(device)
    return Contender(name=name, tokens_of=tokens_of, run=partial(_ours, layout, impl))


def reason_against(name: str, device: torch.device, dtype: torch.dtype, heads: Heads) -> str | None:
    """Why a contender cannot run, or None."""
    kind, impl = name.split()
    if impl == FLA:
        return "a tree is no sequence" if kind == "tree" else _fla_missing(device)
    return unavailable_reason(impl, device=device, dtype=dtype, key_size=heads.key_size, value_size=heads.value_size)


def inputs_of(tokens: int, heads: Heads, dtype: torch.dtype, device: torch.device) -> list[torch.Tensor]:
    """Random leaves; decays are log-uniform from 0.001 to 20 a token."""
    draw = torch.Generator(device).manual_seed(tokens)

    def normal(*shape: int) -> torch.Tensor:
        return torch.randn(tokens, *shape, generator=draw, device=device)

    unit = partial(torch.nn.functional.normalize, dim=-1)
    decay = 1e-3 * 2e4 ** torch.rand(tokens, heads.value_heads, generator=draw, device=device)
    leaves = [
        unit(normal(heads.key_heads, heads.key_size)).to(dtype),
        unit(normal(heads.key_heads, heads.key_size)).to(dtype),
        normal(heads.value_heads, heads.value_size).to(dtype),
        -decay,
        torch.rand(tokens, heads.value_heads, generator=draw, device=device),
    ]
    return [leaf.requires_grad_() for leaf in leaves]


def gate_error(
    small: Contender, truth: Contender, forest: Forest, heads: Heads, dtype: torch.dtype, device: torch.device
) -> float:
    """Largest relative error of the outputs and all gradients of a small forest against float64.

    Raises:
        GateError: it is beyond `LIMIT`, for fla beyond `FLA_SLACK` times that.
    """
    leaves = inputs_of(forest.num_unique, heads, dtype, device)
    exact = [leaf.detach().double().requires_grad_() for leaf in leaves]
    weight = torch.randn(len(small.tokens_of), heads.value_heads, heads.value_size, dtype=torch.float64)
    weight = weight.to(dtype).to(device)
    index = torch.from_numpy(small.tokens_of).to(device)
    results = []
    for inputs, run, is_exact in ((leaves, small.run, False), (exact, truth.run, True)):
        if is_exact:
            # The truth runs every unique token once: outputs of a contender that repeats them are gathered from it.
            out = run(*inputs)[index]
        else:
            out = run(*(leaf[index] for leaf in inputs))
        gradients = torch.autograd.grad((out.double() * weight.double()).sum(), inputs)
        results.append([out.detach(), *gradients])
    limit = LIMIT[dtype] * (FLA_SLACK if small.name.endswith(FLA) else 1)
    return require_exact(small.name, ("out", *NAMES), *results, limit)


def measure(
    shape: str, tokens: int, names: Sequence[str], heads: Heads, timer: Timer, dtype: torch.dtype, device: torch.device
) -> Iterator[Columns]:
    """Rows of the CSV of one tree: gate, then forward alone, then forward and backward. Plans are made before."""
    forest = SHAPES[shape](tokens).forest()
    small = SHAPES[shape](min(tokens, GATE_TOKENS)).forest()
    about: Columns = {"shape": shape, "unique_tokens": forest.num_unique, "flat_tokens": forest.num_flat}
    for name in names:
        row: Columns = {**about, "contender": name}
        reason = reason_against(name, device, dtype, heads)
        if reason is not None:
            yield row | {"not_run": reason}
            continue
        truth = contender("linear chunked" if name.startswith("linear") else "tree chunked", small, device)
        try:
            row["gate_error"] = gate_error(contender(name, small, device), truth, small, heads, dtype, device)
        except (GateError, RuntimeError) as error:
            # fla refuses its backward on Hopper with some versions of Triton by such an error.
            yield row | {"not_run": str(error).splitlines()[0]}
            continue
        one = contender(name, forest, device)
        leaves = inputs_of(len(one.tokens_of), heads, dtype, device)
        gradient = torch.randn(leaves[2].shape, device=device).to(dtype)
        row["measured_tokens"] = len(one.tokens_of)
        for what, run in passes(one.run, leaves, gradient).items():
            row |= spread_columns(what, timer.milliseconds(run))
        yield row


def summarise(rows: Sequence[dict[str, Any]]) -> str:
    """A line per contender that ran; "of linear" is the fastest linear sequence's time over its own."""
    linear: dict[tuple[object, object], float] = {}
    ran = [row for row in rows if "total_ms" in row]
    for row in ran:
        if row["contender"].startswith("linear"):
            case = row["shape"], row["unique_tokens"]
            linear[case] = min(linear.get(case, float("inf")), row["total_ms"])
    lines = []
    for row in ran:
        best = linear.get((row["shape"], row["unique_tokens"]))
        of_linear = "" if best is None else f"{best / row['total_ms']:.3f}"
        about = (row["shape"], str(row["unique_tokens"]), row["contender"])
        lines.append((*about, *time_cells(row), of_linear, f"{row['gate_error']:.1e}"))
    return format_table(HEADER, lines)


def _ours(layout: TreeLayout, impl: str, *inputs: torch.Tensor) -> torch.Tensor:
    return tree_gated_delta_rule(*inputs, layout, impl=impl)[0]


def _fla(offsets: torch.Tensor | None, *inputs: torch.Tensor) -> torch.Tensor:
    from fla.ops.gated_delta_rule import chunk_gated_delta_rule

    # Faster than as transformers calls it, which repeats keys for every value head.
    q, k, v, g, beta = (t.unsqueeze(0) for t in inputs)
    return chunk_gated_delta_rule(q, k, v, g=g, beta=beta, cu_seqlens=offsets)[0][0]


def _force_fla() -> None:
    """Take away fla's guard against a miscompiled product (Triton 3.4 to 3.7.0, Hopper), which needs smaller heads."""
    from fla.ops.common import chunk_o

    chunk_o.TRITON_ABOVE_3_7_1 = True


def _fla_missing(device: torch.device) -> str | None:
    if device.type != "cuda":
        return "flash-linear-attention needs a CUDA device"
    try:
        import fla.ops.gated_delta_rule  # noqa: F401
    except ImportError as error:
        return f"flash-linear-attention does not import: {error}"
    return None


def _offsets(lengths: Sequence[int], device: torch.device) -> torch.Tensor | None:
    """None for a single row, which fla reads without looking anything up."""
    if len(lengths) == 1:
        return None
    return torch.tensor([0, *np.cumsum(lengths).tolist()], dtype=torch.int32, device=device)


def main() -> None:
    """Measure, print a summary, write the CSV after every row."""
    is_cuda = torch.cuda.is_available()
    options = parser(__doc__, group_seconds=0.1)
    options.add_argument("--shapes", nargs="+", choices=SHAPES, default=REGISTRY)
    options.add_argument("--tokens", nargs="+", type=int, default=[32_768, 65_536] if is_cuda else [1_024])
    options.add_argument("--heads", choices=HEADS, default="qwen3.5" if is_cuda else "tiny")
    options.add_argument(
        "--contenders", nargs="+", help=f"kind (tree, linear, rows) and impl ({IMPLEMENTATIONS} or fla)"
    )
    options.add_argument(
        "--force-fla", action="store_true", help="run fla where it refuses Triton on Hopper; the gate still decides"
    )
    args = options.parse_args()
    device, dtype = device_and_dtype(args)
    impl = "triton" if device.type == "cuda" else "chunked"
    names = args.contenders or [f"tree {impl}", f"linear {impl}", "linear fla", f"rows {impl}", "rows fla"]
    about = provenance(commit=args.commit, packages=(*PACKAGES, "flash-linear-attention", "tilelang"))
    about |= {"heads": args.heads, "dtype": str(dtype).removeprefix("torch.")}
    if args.force_fla:
        _force_fla()
    run = partial(
        measure,
        names=names,
        heads=HEADS[args.heads],
        timer=Timer(device, group_seconds=args.group_seconds),
        dtype=dtype,
        device=device,
    )
    measured = (row for shape in args.shapes for tokens in args.tokens for row in run(shape, tokens))
    print(summarise(collect_rows(printed_reasons(measured), about, args.out)))


if __name__ == "__main__":
    main()
