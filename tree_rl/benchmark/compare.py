"""Tree against packed rows on one batch: same model, optimizer and budget, interleaved in one process."""

import gc
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch

from tree_rl.benchmark.batch import Batch
from tree_rl.benchmark.gate import Gradients, check_gradients
from tree_rl.benchmark.phases import OPTIMIZER, PHASES, PLAN, UpdateTimes
from tree_rl.benchmark.results import Spread
from tree_rl.benchmark.update import Planner, update
from tree_rl.tree import ModelShape, Overlap

TREE, PACKED = "tree", "packed"
GATE_TOKENS = 4096
"""Flat tokens of the batch on which gradients are compared, about."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Comparison:
    """One batch, both ways."""

    batch: str
    """Name of the batch."""
    rows: int
    """Rows of the batch."""
    overlap: Overlap
    """Tokens, pairs and head rows of both sides."""
    gradients: Gradients
    """The gate."""
    times: dict[str, list[UpdateTimes]]
    """By side, in the order of the repeats."""

    def seconds(self, side: str) -> Spread:
        """Whole updates of a side."""
        return Spread.of([times.seconds for times in self.times[side]])

    def phase(self, side: str, name: str) -> float:
        """Median seconds of a phase."""
        return Spread.of([times.phases[name] for times in self.times[side]]).median

    @property
    def speed_up(self) -> Spread:
        """Packed over tree: of the medians, and of neighbouring repeats at worst and at best."""
        ratios = [p.seconds / t.seconds for p, t in zip(self.times[PACKED], self.times[TREE], strict=True)]
        median = self.seconds(PACKED).median / self.seconds(TREE).median
        return Spread(median=median, low=min(ratios), high=max(ratios))

    @property
    def speed_up_of_passes(self) -> float:
        """Packed over tree without the optimizer, whose cost does not depend on tokens."""
        passes = {side: self.seconds(side).median - self.phase(side, OPTIMIZER) for side in self.times}
        return passes[PACKED] / passes[TREE]

    def row(self, shape: ModelShape) -> dict[str, object]:
        """Columns of the CSV."""
        bound, overlap = self.overlap.flop_bound(shape), self.overlap
        columns: dict[str, object] = {
            "batch": self.batch,
            "rows": self.rows,
            "por": overlap.por,
            "flat_tokens": overlap.flat_tokens,
            "unique_tokens": overlap.unique_tokens,
            "flat_head_rows": overlap.flat_head_tokens,
            "tree_head_rows": overlap.unique_head_tokens,
            "speed_up": self.speed_up.median,
            "speed_up_low": self.speed_up.low,
            "speed_up_high": self.speed_up.high,
            "flop_bound": bound,
            "token_bound": overlap.token_bound,
            "of_flop_bound": self.speed_up.median / bound,
            "of_token_bound": self.speed_up.median / overlap.token_bound,
            "passes_of_flop_bound": self.speed_up_of_passes / bound,
        }
        for side, times in self.times.items():
            spread = self.seconds(side)
            columns |= {f"{side}_s": spread.median, f"{side}_s_low": spread.low, f"{side}_s_high": spread.high}
            columns |= {f"{side}_{name}_s": self.phase(side, name) for name in PHASES}
            columns[f"{side}_host_plan_s"] = Spread.of([time.host_plan for time in times]).median
            columns[f"{side}_waits_for_plan"] = self.phase(side, PLAN) / spread.median
            columns[f"{side}_peak_gib"] = max(time.peak_bytes for time in times) / 2**30
        columns |= {"tree_gradient_error": self.gradients.tree, "packed_gradient_error": self.gradients.packed}
        return columns


def compare(
    model: Any,
    optimizer: torch.optim.Optimizer,
    batch: Batch,
    planners: dict[str, Planner],
    *,
    repeats: int,
    project_all: bool = False,
    warm_up: Sequence[str] = (TREE, PACKED),
    after_warm_up: Callable[[str], None] | None = None,
) -> Comparison:
    """Compare gradients, warm both sides up, then time them in turns.

    Args:
        model: from `build_model`.
        optimizer: over its parameters.
        batch: the rows.
        planners: of `TREE` and `PACKED`.
        repeats: timed updates of each side.
        project_all: whether the packed planner projects every row, for the bound.
        warm_up: sides that run once before any is timed.
        after_warm_up: called with each side then, such as to trace it.

    Raises:
        GateError: the gradients differ.
    """
    thinned = batch.thinned(max(1, sum(len(row) for row in batch.rows) // GATE_TOKENS))
    gradients = check_gradients(model, thinned, planners[TREE], planners[PACKED])
    for side in warm_up:
        update(model, optimizer, batch, planners[side])
    if after_warm_up is not None:
        for side in planners:
            after_warm_up(side)
    times: dict[str, list[UpdateTimes]] = {side: [] for side in planners}
    # What a trace leaves behind would be collected in the middle of a plan.
    gc.collect()
    for _ in range(repeats):
        for side, planner in planners.items():
            times[side].append(update(model, optimizer, batch, planner))
    overlap = batch.overlap()
    if project_all:
        overlap = replace(overlap, flat_head_tokens=overlap.flat_tokens)
    return Comparison(batch=batch.name, rows=len(batch.rows), overlap=overlap, gradients=gradients, times=times)
