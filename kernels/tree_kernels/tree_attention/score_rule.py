"""How a score is made from a query and a key, apart from the tree."""

from dataclasses import dataclass

import torch


@dataclass(frozen=True, kw_only=True, slots=True)
class ScoreRule:
    """Scale, window and soft cap of one attention call."""

    scale: float
    """factor on q . k"""
    window: int | None = None
    """a query at depth d sees keys of depth > d - window only; None: all ancestors"""
    softcap: float | None = None
    """c in c * tanh(score / c), applied to the scaled score; None: no cap"""

    def scores(self, raw: torch.Tensor) -> torch.Tensor:
        """Scaled and capped scores of raw products q . k of any shape."""
        scaled = raw * self.scale
        return scaled if self.softcap is None else torch.tanh(scaled / self.softcap) * self.softcap
