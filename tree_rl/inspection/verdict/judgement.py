"""The verdict of `tree-rl inspect`: what trees would save on these rows, in a few figures and a sentence."""

from dataclasses import dataclass
from math import inf

from tree_rl.inspection.recording import Recording
from tree_rl.inspection.row import any_trains
from tree_rl.inspection.verdict.grouping import Regrouped
from tree_rl.inspection.verdict.prediction import MemoryPrediction, UpdatePrediction
from tree_rl.inspection.verdict.update_share import UpdateShare

WORTHWHILE = 1.05
"""Least speed-up of a whole step for which trees are said to help."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Reached:
    """Least and largest share of the FLOP bound that updates reached on one H200, against packed rows by `fa4`."""

    kind: str
    bench: tuple[float, float]
    """Shares at all overlaps, by `tree-rl bench` (docs/benchmarks/update_*.csv)."""
    engine: tuple[float, float]
    """Shares at POR 0.92, through verl's engine (docs/benchmarks/whole_model_1gpu.csv)."""
    engine_bound: tuple[float, float]
    """FLOP bounds of the updates in `engine`."""

    def speed_up(self, bound: float) -> tuple[float, float]:
        """Least and largest speed-up through verl's engine that this bound promises.

        What an update missed of its bound did not depend on its tokens: optimizer, clipping, casts. So this part is
        the same share of the rows' update at every bound, and hardly counts where trees save little. At least 1,
        because rows run without a tree if that is faster.
        """
        fixed = [(1 / share - 1) / high for share, high in zip(self.engine, self.engine_bound, strict=True)]
        least, most = (max(1 / (1 / bound + part), 1.0) for part in fixed)
        return least, most


DENSE = Reached(kind="dense models", bench=(0.934, 1.015), engine=(0.828, 0.958), engine_bound=(12.27, 12.28))
EXPERTS = Reached(kind="models with experts", bench=(0.863, 1.041), engine=(0.686, 0.868), engine_bound=(11.81, 11.85))


@dataclass(frozen=True, kw_only=True, slots=True)
class Verdict:
    """What trees would save on the rows of a file, as a trainer stores them that appends calls to rows."""

    rows: int
    """Number of rows in the file."""
    prefix_rows: int
    """Number of rows of the file that are only a prefix of another row."""
    token_bound: float
    """Flat over unique tokens."""
    flop_bound: float
    """Operations of the rows over those of the trees."""
    reached: Reached
    """Measurements of this kind of model."""
    share: UpdateShare
    """Share of a step that trees shorten."""
    recording: Recording
    """Contents of the file."""
    regrouped: tuple[Regrouped, ...]
    """Groups by other columns, if no column of the file names them."""
    memory: MemoryPrediction | None
    """Predicted memory; None if no model is named."""
    update_prediction: UpdatePrediction | None
    """Predicted update; None if no model is named or no token trains."""
    next_command: str
    """Command to type next."""

    @property
    def trains(self) -> bool:
        """True if any token has a loss."""
        return any_trains(self.recording.rows)

    @property
    def equal_rows(self) -> int:
        """Number of rows whose tokens repeat those of another row in their group."""
        rows = self.recording.rows
        return len(rows) - len({(row.group, row.token_ids.tobytes()) for row in rows})

    @property
    def update(self) -> tuple[float, float]:
        """Least and largest expected speed-up of an update."""
        return self.reached.speed_up(self.flop_bound) if self.trains else (1.0, 1.0)

    @property
    def step(self) -> tuple[float, float]:
        """Least and largest expected speed-up of a whole step, over the shares that updates may have in it."""
        (least, most), shares = self.update, self.share.shares
        return self.share.step_speed_up(least, shares[0]), self.share.step_speed_up(most, shares[-1])

    @property
    def helps(self) -> bool:
        """True if a whole step may gain enough."""
        return self.step[1] >= WORTHWHILE

    @property
    def needed_share(self) -> float:
        """Least share of a step in updates with which a whole step gains enough; infinite if none does."""
        saved = 1 - 1 / self.update[0]
        return (1 - 1 / WORTHWHILE) / saved if saved else inf
