"""How a score is computed from a query and a key."""

from dataclasses import dataclass

import torch


@dataclass(frozen=True, kw_only=True, slots=True)
class ScoreRule:
    """Scale, window and soft cap of one attention call."""

    scale: float
    """Factor on q . k."""
    window: int | None = None
    """Attention window, as in `tree_attention`."""
    softcap: float | None = None
    """Cap c in c * tanh(score / c), applied to the scaled score; None: no cap."""

    def scores(self, raw: torch.Tensor) -> torch.Tensor:
        """Scaled and capped scores of raw products q . k of any shape."""
        scaled = raw * self.scale
        return scaled if self.softcap is None else torch.tanh(scaled / self.softcap) * self.softcap
