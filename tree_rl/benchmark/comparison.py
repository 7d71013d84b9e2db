"""Times of the tree and of its rival on one batch: the columns of the CSV and the tables on the terminal."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from tree_rl.benchmark.batch import Batch
from tree_rl.benchmark.gradient_errors import GradientErrors
from tree_rl.benchmark.phases import OPTIMIZER, PLAN, UpdateTimes
from tree_rl.benchmark.results import Columns, Spread
from tree_rl.cost import ModelShape
from tree_rl.inspection.text import format_table

TREE = "tree"


@dataclass(frozen=True, kw_only=True, slots=True)
class Comparison:
    """One batch, both ways."""

    batch: Batch
    """The rows."""
    errors: GradientErrors
    """What the gate saw."""
    times: Mapping[str, Sequence[UpdateTimes]]
    """Two sides, `TREE` and its rival: updates in the order of the repeats."""

    def columns(self, shape: ModelShape) -> Columns:
        """A row of the CSV; the model's shape gives the FLOP bound.

        The speed-up is the ratio of the median times; its range is that of neighbouring repeats.
        """
        (rival,) = (side for side in self.times if side != TREE)
        sides = {side: self._side_columns(side) for side in self.times}
        ratios = [r.seconds / t.seconds for r, t in zip(self.times[rival], self.times[TREE], strict=True)]
        overlap = self.batch.overlap()
        bound = shape.flop_bound(overlap)
        speed_up = sides[rival]["s"] / sides[TREE]["s"]
        columns: Columns = {
            "batch": self.batch.name,
            "rows": len(self.batch.rows),
            "por": overlap.por,
            "flat_tokens": overlap.flat_tokens,
            "unique_tokens": overlap.unique_tokens,
            "flat_head_rows": overlap.flat_head_tokens,
            "tree_head_rows": overlap.unique_head_tokens,
            "speed_up": speed_up,
            "speed_up_low": min(ratios),
            "speed_up_high": max(ratios),
            "flop_bound": bound,
            "token_bound": overlap.token_bound,
            "of_flop_bound": speed_up / bound,
            "of_token_bound": speed_up / overlap.token_bound,
        }
        if OPTIMIZER in self.times[TREE][0].phases:
            # The optimizer's time does not depend on the tokens.
            passes = {side: found["s"] - found[f"{OPTIMIZER}_s"] for side, found in sides.items()}
            columns["passes_of_flop_bound"] = passes[rival] / passes[TREE] / bound
        for side, found in sides.items():
            columns |= {f"{side}_{name}": value for name, value in found.items()}
        return columns | {"tree_gradient_error": self.errors.tree, f"{rival}_gradient_error": self.errors.rows}

    def _side_columns(self, side: str) -> dict[str, float]:
        times = self.times[side]
        spread = Spread.of([time.seconds for time in times])
        columns = {"s": spread.median, "s_low": spread.low, "s_high": spread.high}
        for name in times[0].phases:
            columns[f"{name}_s"] = Spread.of([time.phases[name] for time in times]).median
        if PLAN in times[0].phases:
            columns["waits_for_plan"] = columns[f"{PLAN}_s"] / spread.median
        return columns | {"peak_gib": max(time.peak_bytes for time in times) / 2**30}


def time_in_turns(updates: Mapping[str, Callable[[], UpdateTimes]], *, repeats: int) -> dict[str, list[UpdateTimes]]:
    """Run every side once, then again, so that both meet the same state of the machine."""
    rounds = [{side: run() for side, run in updates.items()} for _ in range(repeats)]
    return {side: [times[side] for times in rounds] for side in updates}


def format_phases(row: Mapping[str, object], rival: str, phases: Sequence[str]) -> str:
    """What the gate saw of one batch, and how long each phase took."""
    lines = [(side, *(f"{row[f'{side}_{name}_s']:.3f}" for name in phases), _peak(row, side)) for side in (TREE, rival)]
    return (
        f"\n{row['batch']}, POR {row['por']:.3f}: gradient error {row['tree_gradient_error']:.2e} ({rival} "
        f"{row[f'{rival}_gradient_error']:.2e}), {row['of_flop_bound']:.3f} of the FLOP bound, "
        f"{row['passes_of_flop_bound']:.3f} without the optimizer\n"
        + format_table(("side", *phases, "peak GiB"), lines)
    )


def format_comparisons(rows: Sequence[Mapping[str, object]], rival: str) -> str:
    """The table of several batches, from `Comparison.columns` against one rival."""
    header = ["batch", "POR", "flat", "unique", "tree s", f"{rival} s"]
    header += ["speed-up", "FLOP bound", "of bound", "1/(1-POR)", "GiB"]
    lines = [
        (
            str(row["batch"]),
            f"{row['por']:.3f}",
            *(f"{row[name]:,}" for name in ("flat_tokens", "unique_tokens")),
            *(f"{row[f'{s}_s']:.3f} ({row[f'{s}_s_low']:.3f} to {row[f'{s}_s_high']:.3f})" for s in (TREE, rival)),
            *(f"{row['speed_up']:.3f}x", f"{row['flop_bound']:.3f}x"),
            *(f"{row['of_flop_bound']:.3f}", f"{row['token_bound']:.3f}x"),
            f"{_peak(row, TREE)} / {_peak(row, rival)}",
        )
        for row in rows
    ]
    return "\n" + format_table(header, lines)


def _peak(row: Mapping[str, object], side: str) -> str:
    """GiB of a GPU; on a CPU nothing is measured."""
    return f"{row[f'{side}_peak_gib']:.1f}" if row[f"{side}_peak_gib"] else "-"
