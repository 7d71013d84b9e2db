"""The recurrence of Mamba 2 over trees against one linear sequence of the same tokens, behind a gate, as a CSV.

Contenders are "tree IMPL" (this op), "linear IMPL" and "linear mamba_ssm" (the same number of tokens in one row). Where
mamba_ssm does not import, its line says why. Every time is that of forward and backward.

python benchmarks/kernels/state_space.py --out docs/benchmarks/state_space.csv
Legend: N unique tokens, G groups of heads, H heads, K state size, P head size.
"""

import sys
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from pathlib import Path

import torch

sys.path.insert(0, str(Path(__file__).parent))
from forest_shapes import SHAPES
from gated_delta_rule import summarise
from kernel_runs import (
    GateError,
    Timer,
    device_and_dtype,
    parser,
    passes,
    printed_reasons,
    require_exact,
    spread_columns,
)

from tree_kernels import TreeLayout, tree_state_space
from tree_kernels.tree_state_space.api import unavailable_reason
from tree_rl.benchmark.provenance import PACKAGES, provenance
from tree_rl.benchmark.results import Columns, collect_rows
from tree_rl.tree import Forest

RIVAL = "linear mamba_ssm"
REGISTRY = ("grpo", "stubs", "tiny", "chains", "causal")
GATE_TOKENS = 1_000
LIMIT = {torch.bfloat16: 2e-2, torch.float16: 3e-3, torch.float32: 2e-6}
"""Largest relative error (norm) of an output or a gradient against float64, as in test_recurrences_on_cuda.py."""
HEADS = {"nemotron-h-8b": (8, 128, 128, 64), "zamba2": (1, 80, 64, 64), "tiny": (1, 2, 16, 16)}
"""G, H, K and P of a model's layers."""
NAMES = ("x", "b", "c", "g", "dt")
Heads = tuple[int, int, int, int]
Run = Callable[..., torch.Tensor]


def inputs_of(tokens: int, heads: Heads, dtype: torch.dtype, device: torch.device) -> list[torch.Tensor]:
    """Random leaves; decays are log-uniform from 0.001 to 20 a token."""
    groups, number, state, size = heads
    draw = torch.Generator(device).manual_seed(tokens)
    normal = partial(torch.randn, generator=draw, device=device)
    steps = torch.rand(tokens, number, generator=draw, device=device)
    decay = 1e-3 * 2e4 ** torch.rand(tokens, number, generator=draw, device=device)
    shapes = ((tokens, number, size), (tokens, groups, state), (tokens, groups, state))
    return [leaf.requires_grad_() for leaf in (*(normal(shape).to(dtype) for shape in shapes), -decay, steps)]


def run_of(name: str, forest: Forest, device: torch.device) -> Run:
    """A contender of a forest by its name."""
    if name == RIVAL:
        return _mamba_ssm
    kind, impl = name.split()
    tokens = forest.num_unique
    end = torch.full((tokens,), tokens).int() if kind == "linear" else torch.from_numpy(forest.subtree_end)
    return partial(_ours, TreeLayout.from_subtree_end(end).to(device), impl)


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


def measure(
    shape: str, tokens: int, names: Sequence[str], heads: Heads, timer: Timer, dtype: torch.dtype, device: torch.device
) -> Iterator[Columns]:
    """Rows of the CSV of one tree: gate, then forward alone, then forward and backward. Plans are made before."""
    forest = SHAPES[shape](tokens).forest()
    small = SHAPES[shape](min(tokens, GATE_TOKENS)).forest()
    for name in names:
        row: Columns = {"shape": shape, "unique_tokens": forest.num_unique, "contender": name}
        reason = reason_against(name, heads, device, dtype)
        if reason is not None:
            yield row | {"not_run": reason}
            continue
        try:
            row["gate_error"] = gate_error(name, small, heads, dtype, device)
        except GateError as error:
            yield row | {"not_run": str(error)}
            continue
        leaves = inputs_of(forest.num_unique, heads, dtype, device)
        gradient = torch.randn(leaves[0].shape, device=device).to(dtype)
        for what, run in passes(run_of(name, forest, device), leaves, gradient).items():
            row |= spread_columns(what, timer.milliseconds(run))
        yield row


def gate_error(name: str, forest: Forest, heads: Heads, dtype: torch.dtype, device: torch.device) -> float:
    """Largest relative error of the outputs and all gradients of a small forest against float64.

    Raises:
        GateError: it is beyond `LIMIT`.
    """
    leaves = inputs_of(forest.num_unique, heads, dtype, device)
    exact = [leaf.detach().double().requires_grad_() for leaf in leaves]
    weight = torch.randn(leaves[0].shape, device=device).to(dtype).double()
    truth = "linear chunked" if name.startswith("linear") else "tree chunked"
    results = []
    for inputs, one in ((leaves, name), (exact, truth)):
        out = run_of(one, forest, device)(*inputs)
        results.append([out.detach(), *torch.autograd.grad((out.double() * weight).sum(), inputs)])
    return require_exact(name, ("out", *NAMES), *results, LIMIT[dtype])


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
    is_cuda = torch.cuda.is_available()
    options = parser(__doc__, group_seconds=0.1)
    options.add_argument("--shapes", nargs="+", choices=SHAPES, default=REGISTRY)
    options.add_argument("--tokens", nargs="+", type=int, default=[32_768, 65_536] if is_cuda else [1_024])
    options.add_argument("--heads", choices=HEADS, default="nemotron-h-8b" if is_cuda else "tiny")
    options.add_argument("--contenders", nargs="+", help=f"kind (tree, linear) and implementation, or {RIVAL}")
    args = options.parse_args()
    device, dtype = device_and_dtype(args)
    impl = "triton" if is_cuda else "chunked"
    about = provenance(commit=args.commit, packages=(*PACKAGES, "mamba-ssm"))
    about |= {"heads": args.heads, "dtype": str(dtype).removeprefix("torch.")}
    run = partial(
        measure,
        names=args.contenders or [f"tree {impl}", f"linear {impl}", RIVAL],
        heads=HEADS[args.heads],
        timer=Timer(device, group_seconds=args.group_seconds),
        dtype=dtype,
        device=device,
    )
    measured = (row for shape in args.shapes for tokens in args.tokens for row in run(shape, tokens))
    print(summarise(collect_rows(printed_reasons(measured), about, args.out)))


if __name__ == "__main__":
    main()
