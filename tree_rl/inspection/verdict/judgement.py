"""The verdict of `tree-rl inspect`: what trees would save on these rows, in a few figures and a sentence."""

from dataclasses import dataclass

from tree_rl.inspection.recording import Recording
from tree_rl.inspection.row import any_trains
from tree_rl.inspection.verdict.grouping import Regrouped
from tree_rl.inspection.verdict.prediction import MemoryPrediction, UpdatePrediction
from tree_rl.inspection.verdict.update_share import UpdateShare

REACHED = (0.96, 1.02)
"""Shares of the bound by operations that measured updates reached (README, How fast)."""
WORTHWHILE = 1.05
"""Speed-up of a whole step below which trees save little."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Verdict:
    """What the rows of a file promise."""

    token_bound: float
    """Flat over unique tokens."""
    flop_bound: float
    """Operations of the rows over those of the trees."""
    share: UpdateShare
    """Share of a step that trees shorten."""
    recording: Recording
    """What the file held."""
    regrouped: tuple[Regrouped, ...]
    """Groups by other columns, where none names them."""
    memory: MemoryPrediction | None
    """None where no model is named."""
    update_prediction: UpdatePrediction | None
    """None where no model is named or no token trains."""
    next_command: str
    """What to type next."""

    @property
    def trains(self) -> bool:
        """Whether any token has a loss."""
        return any_trains(self.recording.rows)

    @property
    def equal_rows(self) -> int:
        """Rows that repeat another row of their group, token by token."""
        rows = self.recording.rows
        return len(rows) - len({(row.group, row.token_ids.tobytes()) for row in rows})

    @property
    def update(self) -> float:
        """Expected speed-up of an update; rows run without a tree where that is faster."""
        return max(REACHED[0] * self.flop_bound, 1.0) if self.trains else 1.0

    @property
    def step(self) -> float:
        """Expected speed-up of a whole step."""
        return self.share.step_speed_up(self.update)

    @property
    def helps(self) -> bool:
        """Whether a whole step gains enough."""
        return self.step >= WORTHWHILE
