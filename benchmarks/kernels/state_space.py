"""The recurrence of Mamba 2 over trees against one linear sequence of the same tokens, behind a gate, as a CSV.

Contenders are "tree IMPL" (this op), "linear IMPL" and "linear mamba_ssm" (the same number of tokens in one row). Where
mamba_ssm does not import, its line says why. Every time is that of forward and backward.

python benchmarks/kernels/state_space.py --out docs/benchmarks/state_space.csv
Legend: N unique tokens, G groups of heads, H heads, K state size, P head size.
"""

import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path

import numpy as np
import torch

sys.path.insert(0, str(Path(__file__).parent))
from kernel_runs import device_and_dtype
from recurrence_runs import Contender, Recurrence, compare, recurrence_parser

from tree_kernels import TreeLayout, tree_state_space
from tree_kernels.tree_state_space.api import unavailable_reason
from tree_rl.tree import Forest

RIVAL = "linear mamba_ssm"
LIMIT = {torch.bfloat16: 2e-2, torch.float16: 3e-3, torch.float32: 2e-6}
"""Largest relative error (norm) of an output or a gradient against float64, as in test_recurrences_on_cuda.py."""
HEADS = {"nemotron-h-8b": (8, 128, 128, 64), "zamba2": (1, 80, 64, 64), "tiny": (1, 2, 16, 16)}
"""G, H, K and P of a model's layers."""
Heads = tuple[int, int, int, int]


def inputs_of(tokens: int, heads: Heads, dtype: torch.dtype, device: torch.device) -> list[torch.Tensor]:
    """Random leaves; decays are log-uniform from 0.001 to 20 a token."""
    groups, number, state, size = heads
    draw = torch.Generator(device).manual_seed(tokens)
    normal = partial(torch.randn, generator=draw, device=device)
    steps = torch.rand(tokens, number, generator=draw, device=device)
    decay = 1e-3 * 2e4 ** torch.rand(tokens, number, generator=draw, device=device)
    shapes = ((tokens, number, size), (tokens, groups, state), (tokens, groups, state))
    return [leaf.requires_grad_() for leaf in (*(normal(shape).to(dtype) for shape in shapes), -decay, steps)]


def contender(name: str, forest: Forest, device: torch.device) -> Contender:
    """A contender of a forest by its name."""
    tokens = forest.num_unique
    run: Callable[..., torch.Tensor] = _mamba_ssm
    if name != RIVAL:
        kind, impl = name.split()
        end = torch.full((tokens,), tokens).int() if kind == "linear" else torch.from_numpy(forest.subtree_end)
        run = partial(_ours, TreeLayout.from_subtree_end(end).to(device), impl)
    return Contender(name=name, tokens_of=np.arange(tokens), run=run)


def reason_against(name: str, heads: Heads, device: torch.device, dtype: torch.dtype) -> str | None:
    """Why a contender cannot run, or None."""
    if name != RIVAL:
        sizes = {"state_size": heads[2], "head_size": heads[3]}
        return unavailable_reason(name.split()[1], device=device, dtype=dtype, **sizes)
    if device.type != "cuda":
        return "mamba_ssm needs a CUDA device"
    try:
        import mamba_ssm.ops.triton.ssd_combined  # noqa: F401
    except ImportError as error:
        return f"mamba_ssm does not import: {error}"
    return None


def _ours(layout: TreeLayout, impl: str, *inputs: torch.Tensor) -> torch.Tensor:
    return tree_state_space(*inputs, layout, impl=impl)[0]


def _mamba_ssm(x: torch.Tensor, b: torch.Tensor, c: torch.Tensor, g: torch.Tensor, dt: torch.Tensor) -> torch.Tensor:
    from mamba_ssm.ops.triton.ssd_combined import mamba_chunk_scan_combined

    # It multiplies one decay per head with the step; for decays per token, the step goes into x instead.
    of_heads = -torch.ones(x.shape[1], device=x.device)
    written = (x * (dt / -g).unsqueeze(-1)).to(x.dtype)
    return mamba_chunk_scan_combined(written[None], -g[None], of_heads, b[None], c[None], chunk_size=256)[0]


def main() -> None:
    """Measure, print a summary, write the CSV after every row."""
    options = recurrence_parser(__doc__, HEADS, default="nemotron-h-8b")
    options.add_argument("--contenders", nargs="+", help=f"kind (tree, linear) and implementation, or {RIVAL}")
    args = options.parse_args()
    device, dtype = device_and_dtype(args)
    heads = HEADS[args.heads]
    recurrence = Recurrence(
        contender=partial(contender, device=device),
        reason_against=partial(reason_against, heads=heads, device=device, dtype=dtype),
        inputs_of=partial(inputs_of, heads=heads, dtype=dtype, device=device),
        names=("x", "b", "c", "g", "dt"),
        like_output=0,
        limit_of=lambda _: LIMIT[dtype],
        runs_rows=False,
    )
    impl = "triton" if torch.cuda.is_available() else "chunked"
    names = args.contenders or [f"tree {impl}", f"linear {impl}", RIVAL]
    compare(args, recurrence, names, ("mamba-ssm",))


if __name__ == "__main__":
    main()
