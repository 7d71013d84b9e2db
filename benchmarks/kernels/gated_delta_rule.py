"""The gated delta rule over trees against one linear sequence of the same tokens, behind a gate, as a CSV.

Contenders are "tree IMPL" (this op), "linear IMPL" and "linear fla" (the same number of tokens in one row), "rows IMPL"
and "rows fla" (every row alone, packed). fla is flash-linear-attention; where it does not import or refuses to run, its
lines say why.

python benchmarks/kernels/gated_delta_rule.py --out docs/benchmarks/gated_delta_rule.csv
Legend: N unique tokens, F tokens of rows laid end to end, H heads, K and V state sizes.
"""

import sys
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import numpy as np
import torch

sys.path.insert(0, str(Path(__file__).parent))
from kernel_runs import device_and_dtype
from recurrence_runs import Contender, Recurrence, compare, recurrence_parser

from tree_kernels import TreeLayout, tree_gated_delta_rule
from tree_kernels.tree_gated_delta_rule.api import IMPLEMENTATIONS, unavailable_reason
from tree_rl.tree import Forest

FLA = "fla"
LIMIT = {torch.bfloat16: 1.2e-2, torch.float16: 1.5e-3, torch.float32: 2e-6}
"""Largest relative error (norm) of an output or a gradient against float64, as in test_recurrences_on_cuda.py."""
FLA_SLACK = 2
"""fla may be so much further off: its path sums of the gates are float32. A wrong product shows as an error of 1."""


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
    run = partial(tree_gated_delta_rule, layout=layout, impl=impl)
    return Contender(name=name, tokens_of=tokens_of, run=lambda *inputs: run(*inputs)[0])


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


def recurrence(heads: Heads, dtype: torch.dtype, device: torch.device) -> Recurrence:
    """The rule with these heads."""
    return Recurrence(
        contender=partial(contender, device=device),
        reason_against=partial(reason_against, device=device, dtype=dtype, heads=heads),
        inputs_of=partial(inputs_of, heads=heads, dtype=dtype, device=device),
        names=("q", "k", "v", "g", "beta"),
        like_output=2,
        limit_of=lambda name: LIMIT[dtype] * (FLA_SLACK if name.endswith(FLA) else 1),
        runs_rows=True,
    )


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
    options = recurrence_parser(__doc__, HEADS, default="qwen3.5")
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
    if args.force_fla:
        _force_fla()
    compare(args, recurrence(HEADS[args.heads], dtype, device), names, ("flash-linear-attention", "tilelang"))


if __name__ == "__main__":
    main()
