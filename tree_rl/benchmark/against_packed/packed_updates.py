"""`tree-rl bench --against packed`: time updates of trees and packed rows, or train both and compare their losses."""

import gc
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from typing import Any

import torch

import tree_kernels
from tree_rl.benchmark.against_packed import packed_attention
from tree_rl.benchmark.against_packed.deviation import deviation_curves, format_curves
from tree_rl.benchmark.against_packed.gradient_check import check_gradients
from tree_rl.benchmark.against_packed.profiled_update import profile_update
from tree_rl.benchmark.against_packed.random_model import (
    PACKED_LINEAR_ATTENTION,
    build_model,
    build_optimizer,
    recurrence_implementation,
)
from tree_rl.benchmark.against_packed.update import PACKED, Planner, packed_planner, tree_planner, update
from tree_rl.benchmark.batch import Batch
from tree_rl.benchmark.bench_options import MAX_TOKENS, BenchOptions
from tree_rl.benchmark.comparison import TREE, Comparison, format_comparisons, format_phases, time_in_turns
from tree_rl.benchmark.figure import draw_deviation, draw_speed_up
from tree_rl.benchmark.phases import PHASES
from tree_rl.benchmark.provenance import provenance
from tree_rl.benchmark.results import Columns, collect_rows, print_setting
from tree_rl.inspection.files import InputError
from tree_rl.inspection.files.quoting import quoted
from tree_rl.tree import Forest

LEARNING_RATE = 1e-6
"""Learning rate of timed updates."""
CURVE_BATCHES = 4
"""Batches of drawn rows that loss curves take in turns."""


def run_against_packed(options: BenchOptions, say: Callable[[str], None]) -> list[Columns]:
    """Run the benchmark, report to `say`, and return the rows of the CSV; raises an InputError or a GateError."""
    device, max_tokens = options.device, options.max_tokens or MAX_TOKENS
    _check_packed_attention(options)
    about = _setting(options) | provenance(commit=options.commit)
    print_setting(about, say)
    model = build_model(
        options.size,
        device=device,
        dtype=options.dtype,
        tree_impl=options.tree_attention,
        packed_impl=options.packed_attention,
        checkpointing=options.checkpointing,
        liger=options.has_fused_layers,
    )
    planners = {TREE: tree_planner(max_tokens, device), PACKED: packed_planner(max_tokens, device)}
    path = options.csv("deviation" if options.steps else "update")
    measured = _curves(options, model, planners) if options.steps else _times(options, model, planners, say)
    rows = collect_rows(measured, about, path)
    say(format_curves(rows) if options.steps else format_comparisons(rows, PACKED))
    if path is not None:
        draw = draw_deviation if options.steps else draw_speed_up
        draw(rows, path.with_suffix(".png"))
        say(f"Written to {path} and .png")
    return rows


def compare(
    model: Any,
    optimizer: torch.optim.Optimizer,
    batch: Batch,
    planners: Mapping[str, Planner],
    *,
    repeats: int,
    before_timing: Callable[[], None] = lambda: None,
) -> Comparison:
    """Compare gradients, warm both sides up, call `before_timing`, then time both in turns, `repeats` times each."""
    updates = {side: partial(update, model, optimizer, batch, planner) for side, planner in planners.items()}
    errors = check_gradients(model, batch.for_gate(), planners[TREE], planners[PACKED])
    time_in_turns(updates, repeats=1)
    before_timing()
    # Garbage of a trace is not collected in the middle of a plan.
    gc.collect()
    times = time_in_turns(updates, repeats=repeats)
    return Comparison(batch=batch, errors=errors, times=times)


def _times(
    options: BenchOptions, model: Any, planners: Mapping[str, Planner], say: Callable[[str], None]
) -> Iterator[Columns]:
    optimizer = build_optimizer(model, lr=LEARNING_RATE)

    def trace(batch: Batch) -> None:
        for side, planner in planners.items() if options.trace else ():
            say(f"{side}: {profile_update(model, partial(update, model, optimizer, batch, planner))[1]}")

    asked = options.batch_of_each_por()
    for por, batch in asked:
        _check_size(options, por, [batch])
    for number, (por, batch) in enumerate(asked, 1):
        say(f"POR {por:g}, {number} of {len(asked)}")
        before = partial(trace, batch)
        found = compare(model, optimizer, batch, planners, repeats=options.repeats, before_timing=before)
        columns = found.columns(options.size.shape)
        say(format_phases(columns, PACKED, PHASES))
        yield columns


def _curves(options: BenchOptions, model: Any, planners: Mapping[str, Planner]) -> Iterator[Columns]:
    # A long recording is seen once; drawn tokens can only be learnt by heart.
    count = CURVE_BATCHES if options.recording is None else options.steps
    batches = options.batches(options.pors[0], count=count)
    _check_size(options, options.pors[0], batches)
    return deviation_curves(model, batches, planners, steps=options.steps, lr=options.learning_rate)


def _check_size(options: BenchOptions, por: float, batches: Sequence[Batch]) -> None:
    """InputError if a group's tree does not fit into one forward."""
    max_tokens = options.max_tokens or MAX_TOKENS
    groups = ([batch.rows[row] for row in rows] for batch in batches for rows in batch.rows_of_groups())
    largest = max(Forest.from_rows(rows).num_unique for rows in groups)
    if largest > max_tokens:
        raise InputError(
            f"--max-tokens {max_tokens}: expected at least {largest}, the unique tokens of the largest group at POR "
            f"{por:g}; raise it, or take fewer or shorter rows (--num-rows, --row-tokens)"
        )


def _check_packed_attention(options: BenchOptions) -> None:
    """Refuse it by the name of its option; the model that is built later would fail without it."""
    asked, choices = options.packed_attention, ("auto", *packed_attention.IMPLEMENTATIONS)
    if asked not in choices:
        raise InputError(f"--packed-attention {quoted(asked)}: expected one of {', '.join(choices)}")
    shape = options.size.shape
    place = (options.device, options.dtype, shape.head_dim, shape.value_size)
    if asked != "auto" and (reason := packed_attention.unavailable_reason(asked, *place)):
        raise InputError(f"--packed-attention {asked}: {reason}; name another, or auto")


def _setting(options: BenchOptions) -> Columns:
    """Columns about what ran; for "auto", the implementation that it chose."""
    size = options.size
    place: dict[str, Any] = {"device": options.device, "dtype": options.dtype}
    sizes = place | {"head_size": size.shape.head_dim, "value_size": size.shape.value_size}
    tree, packed = options.tree_attention, options.packed_attention
    if tree == "auto":
        tree = tree_kernels.chosen_implementation(**sizes)
        tree = "fa4, triton for tiny segments" if tree == "fa4" else tree
    if packed == "auto":
        packed = packed_attention.chosen_implementation(**sizes)
    linear = recurrence_implementation(size, **place)
    return {
        **options.setting(),
        "tree_attention": tree,
        "packed_attention": packed,
        "tree_linear_attention": linear,
        "packed_linear_attention": PACKED_LINEAR_ATTENTION if linear else "",
        "packed_head": "trained tokens",
        "max_tokens": str(options.max_tokens or MAX_TOKENS),
        "learning_rate": f"{options.learning_rate if options.steps else LEARNING_RATE:g}",
    }
