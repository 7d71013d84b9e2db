"""The verdict of `tree-rl inspect`: what trees would save on these rows, in a few figures and a sentence."""

from dataclasses import dataclass

from tree_rl.inspection.recording import Recording
from tree_rl.inspection.row import any_trains
from tree_rl.inspection.verdict.grouping import Regrouped
from tree_rl.inspection.verdict.prediction import MemoryPrediction, UpdatePrediction
from tree_rl.inspection.verdict.update_share import UpdateShare

REACHED = (0.96, 1.02)
"""Least and largest share of the FLOP bound that measured updates reached (README, How fast)."""
WORTHWHILE = 1.05
"""Least speed-up of a whole step for which trees are said to help."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Verdict:
    """What trees would save on the rows of a file."""

    token_bound: float
    """Flat over unique tokens."""
    flop_bound: float
    """Operations of the rows over those of the trees."""
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
    def update(self) -> float:
        """Expected speed-up of an update; at least 1, because rows run without a tree if that is faster."""
        return max(REACHED[0] * self.flop_bound, 1.0) if self.trains else 1.0

    @property
    def step(self) -> float:
        """Expected speed-up of a whole step."""
        return self.share.step_speed_up(self.update)

    @property
    def helps(self) -> bool:
        """True if a whole step gains enough."""
        return self.step >= WORTHWHILE
