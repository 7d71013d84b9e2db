"""What the benchmarks of recurrences share: contenders by name, the gate against float64, times, the command line."""

import argparse
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from importlib import import_module
from typing import Any, ClassVar

import numpy as np
import torch
from forest_shapes import SHAPES
from kernel_runs import (
    Timer,
    device_and_dtype,
    parser,
    passes,
    printed_reasons,
    require_exact,
    spread_columns,
    time_cells,
)

from tree_kernels import TreeLayout
from tree_rl.benchmark.provenance import PACKAGES, provenance
from tree_rl.benchmark.results import Columns, collect_rows
from tree_rl.inspection.text import format_table
from tree_rl.tree import Forest

REGISTRY = ("grpo", "stubs", "tiny", "chains", "causal")
"""16 answers to one prompt; a trunk with stubs; segments of 10 to 100 tokens; rows that share nothing; one row."""
GATE_TOKENS = 1_000
HEADER = ("shape", "tokens", "contender", "ms fwd", "ms f+b", "range", "of linear", "error")


@dataclass(frozen=True, kw_only=True, slots=True)
class Contender:
    """One way to run the recurrence."""

    name: str
    tokens_of: np.ndarray
    """int64, the unique token that each of its tokens computes"""
    run: Callable[..., torch.Tensor]
    """(leaves of its tokens) to outputs."""


class Recurrence(ABC):
    """An operation at the sizes of a model; its contenders are called "KIND IMPL", of kinds tree, linear and rows."""

    heads_of: ClassVar[Mapping[str, Any]]
    """Name of a model -> its heads; "tiny" runs on a CPU."""
    names: ClassVar[tuple[str, ...]]
    """Names of the leaves."""
    like_output: ClassVar[int]
    """Index of the leaf with shape and dtype of the output."""
    limits: ClassVar[Mapping[torch.dtype, float]]
    """Largest relative error (norm) of an output or a gradient against float64, as in test_recurrences_on_cuda.py."""
    rival: ClassVar[str]
    """The IMPL of another library."""
    rival_module: ClassVar[str]
    """Where that is imported from."""
    rival_slack: ClassVar[float] = 1
    """It may be so many times further off."""

    def __init__(self, heads: Any, dtype: torch.dtype, device: torch.device) -> None:
        self.heads, self.dtype, self.device = heads, dtype, device

    @abstractmethod
    def _ours(self, layout: TreeLayout, impl: str, *leaves: torch.Tensor) -> torch.Tensor:
        """Outputs of this op."""

    @abstractmethod
    def _rivals(self, offsets: torch.Tensor | None, *leaves: torch.Tensor) -> torch.Tensor:
        """Outputs of the rival for rows between these offsets; None stands for one row, read without look-ups."""

    @abstractmethod
    def _reason_against_ours(self, impl: str) -> str | None:
        """Why an implementation of this op cannot run, or None."""

    @abstractmethod
    def _leaves(self, tokens: int, draw: torch.Generator) -> list[torch.Tensor]:
        """Random inputs of so many tokens."""

    def inputs_of(self, tokens: int) -> list[torch.Tensor]:
        """The same leaves each time."""
        draw = torch.Generator(self.device).manual_seed(tokens)
        return [leaf.requires_grad_() for leaf in self._leaves(tokens, draw)]

    def decay(self, tokens: int, heads: int, draw: torch.Generator) -> torch.Tensor:
        """Decays [tokens, heads], log-uniform from 0.001 to 20 a token."""
        return -1e-3 * 2e4 ** torch.rand(tokens, heads, generator=draw, device=self.device)

    def contender(self, name: str, forest: Forest) -> Contender:
        """A contender of a forest by its name."""
        kind, impl = name.split()
        tokens_of, lengths = np.arange(forest.num_unique), [forest.num_unique]
        if kind == "rows":
            tokens_of, lengths = forest.row_index.values, forest.row_index.lengths.tolist()
        if impl == self.rival:
            ends = torch.tensor([0, *np.cumsum(lengths)], dtype=torch.int32, device=self.device)
            return Contender(
                name=name, tokens_of=tokens_of, run=partial(self._rivals, ends if len(lengths) > 1 else None)
            )
        ends = forest.subtree_end if kind == "tree" else np.repeat(np.cumsum(lengths), lengths)
        layout = TreeLayout.from_subtree_end(torch.from_numpy(ends.astype(np.int32))).to(self.device)
        return Contender(name=name, tokens_of=tokens_of, run=partial(self._ours, layout, impl))

    def reason_against(self, name: str) -> str | None:
        """Why a contender cannot run, or None."""
        kind, impl = name.split()
        if impl != self.rival:
            return self._reason_against_ours(impl)
        if kind == "tree":
            return "a tree is no sequence"
        if self.device.type != "cuda":
            return f"{self.rival} needs a CUDA device"
        try:
            import_module(self.rival_module)
        except ImportError as error:
            return f"{self.rival} does not import: {error}"
        return None

    def gate_error(self, small: Contender, truth: Contender, tokens: int) -> float:
        """Largest relative error of the outputs and all gradients of a small forest against float64.

        Raises:
            GateError: it is beyond the contender's limit.
        """
        leaves = self.inputs_of(tokens)
        exact = [leaf.detach().double().requires_grad_() for leaf in leaves]
        index = torch.from_numpy(small.tokens_of).to(leaves[0].device)
        weight = torch.randn_like(leaves[self.like_output][index]).double()
        # The truth runs every unique token once: outputs of a contender that repeats them are gathered from it.
        outs = (small.run(*(leaf[index] for leaf in leaves)), truth.run(*exact)[index])
        results = [
            [out.detach(), *torch.autograd.grad((out.double() * weight).sum(), inputs)]
            for out, inputs in zip(outs, (leaves, exact), strict=True)
        ]
        slack = self.rival_slack if small.name.endswith(self.rival) else 1
        return require_exact(small.name, ("out", *self.names), *results, self.limits[self.dtype] * slack)

    def measure(self, shape: str, tokens: int, names: Sequence[str], timer: Timer) -> Iterator[Columns]:
        """Rows of the CSV of one tree: gate, then forward alone, then forward and backward. Plans are made before."""
        forest = SHAPES[shape](tokens).forest()
        small = SHAPES[shape](min(tokens, GATE_TOKENS)).forest()
        about: Columns = {"shape": shape, "unique_tokens": forest.num_unique, "flat_tokens": forest.num_flat}
        for name in names:
            row: Columns = {**about, "contender": name}
            reason = self.reason_against(name)
            if reason is not None:
                yield row | {"not_run": reason}
                continue
            truth = self.contender("linear chunked" if name.startswith("linear") else "tree chunked", small)
            try:
                row["gate_error"] = self.gate_error(self.contender(name, small), truth, small.num_unique)
            except RuntimeError as error:
                # A GateError; and fla refuses its backward on Hopper with some versions of Triton by such an error.
                yield row | {"not_run": str(error).splitlines()[0]}
                continue
            one = self.contender(name, forest)
            leaves = self.inputs_of(len(one.tokens_of))
            row["measured_tokens"] = len(one.tokens_of)
            for what, run in passes(one.run, leaves, torch.randn_like(leaves[self.like_output])).items():
                row |= spread_columns(what, timer.milliseconds(run))
            yield row


def recurrence_parser(description: str | None, recurrence: type[Recurrence]) -> argparse.ArgumentParser:
    """A command line with the options of all recurrences; a GPU gets the first heads by default, a CPU "tiny"."""
    is_cuda, heads = torch.cuda.is_available(), list(recurrence.heads_of)
    options = parser(description, group_seconds=0.1)
    options.add_argument("--shapes", nargs="+", choices=SHAPES, default=REGISTRY)
    options.add_argument("--tokens", nargs="+", type=int, default=[32_768, 65_536] if is_cuda else [1_024])
    options.add_argument("--heads", choices=heads, default=heads[0] if is_cuda else "tiny")
    options.add_argument(
        "--contenders", nargs="+", help=f"kind (tree, linear, rows) and impl (ours, or {recurrence.rival})"
    )
    return options


def compare(
    args: argparse.Namespace, kind: type[Recurrence], contenders: Sequence[str], packages: Sequence[str]
) -> None:
    """Measure, print a summary, write the CSV after every row.

    Args:
        args: of `recurrence_parser`.
        kind: what to measure.
        contenders: names, where the command line has none; IMPL stands for the device's fastest of ours.
        packages: of the rival, whose versions count.
    """
    device, dtype = device_and_dtype(args)
    impl = "triton" if device.type == "cuda" else "chunked"
    names = args.contenders or [name.replace("IMPL", impl) for name in contenders]
    recurrence = kind(kind.heads_of[args.heads], dtype, device)
    timer = Timer(device, group_seconds=args.group_seconds)
    about = provenance(commit=args.commit, packages=(*PACKAGES, *packages))
    about |= {"heads": args.heads, "dtype": str(dtype).removeprefix("torch.")}
    trees = ((shape, tokens) for shape in args.shapes for tokens in args.tokens)
    measured = (row for shape, tokens in trees for row in recurrence.measure(shape, tokens, names, timer))
    print(summarise(collect_rows(printed_reasons(measured), about, args.out)))


def summarise(rows: Sequence[Mapping[str, Any]]) -> str:
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
