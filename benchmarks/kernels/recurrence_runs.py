"""What the benchmarks of recurrences share: contenders by name, the gate against float64, times, the command line."""

import argparse
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

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


@dataclass(frozen=True, kw_only=True, slots=True)
class Recurrence:
    """An operation at the sizes of a model."""

    contender: Callable[[str, Forest], Contender]
    """A contender of a forest by its name, "KIND IMPL"."""
    reason_against: Callable[[str], str | None]
    """Why a contender cannot run, or None."""
    inputs_of: Callable[[int], list[torch.Tensor]]
    """Random leaves of so many tokens."""
    names: tuple[str, ...]
    """Names of the leaves."""
    like_output: int
    """Index of the leaf with shape and dtype of the output."""
    limit_of: Callable[[str], float]
    """Largest relative error (norm) of a contender's output or gradient against float64."""
    runs_rows: bool
    """True if contenders run rows, too: then the CSV has their tokens."""

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
        return require_exact(small.name, ("out", *self.names), *results, self.limit_of(small.name))

    def measure(self, shape: str, tokens: int, names: Sequence[str], timer: Timer) -> Iterator[Columns]:
        """Rows of the CSV of one tree: gate, then forward alone, then forward and backward. Plans are made before."""
        forest = SHAPES[shape](tokens).forest()
        small = SHAPES[shape](min(tokens, GATE_TOKENS)).forest()
        about: Columns = {"shape": shape, "unique_tokens": forest.num_unique}
        about |= {"flat_tokens": forest.num_flat} if self.runs_rows else {}
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
            row |= {"measured_tokens": len(one.tokens_of)} if self.runs_rows else {}
            for what, run in passes(one.run, leaves, torch.randn_like(leaves[self.like_output])).items():
                row |= spread_columns(what, timer.milliseconds(run))
            yield row


def recurrence_parser(description: str | None, heads: Iterable[str], *, default: str) -> argparse.ArgumentParser:
    """A command line with the options of all recurrences; `default` are the heads on a GPU, "tiny" those on a CPU."""
    is_cuda = torch.cuda.is_available()
    options = parser(description, group_seconds=0.1)
    options.add_argument("--shapes", nargs="+", choices=SHAPES, default=REGISTRY)
    options.add_argument("--tokens", nargs="+", type=int, default=[32_768, 65_536] if is_cuda else [1_024])
    options.add_argument("--heads", choices=heads, default=default if is_cuda else "tiny")
    return options


def compare(args: argparse.Namespace, recurrence: Recurrence, names: Sequence[str], rivals: Sequence[str]) -> None:
    """Measure, print a summary, write the CSV after every row; `rivals` are packages whose versions count."""
    device, dtype = device_and_dtype(args)
    timer = Timer(device, group_seconds=args.group_seconds)
    about = provenance(commit=args.commit, packages=(*PACKAGES, *rivals))
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
