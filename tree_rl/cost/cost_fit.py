"""Fits the cost model to measured updates: seconds per forward, per token, per visible pair and per head token.

Experts and recurrent layers cost the same for every token, so the seconds per token include them.
Legend: E equations, one per measured update; T terms.
"""

import itertools
from collections import deque
from dataclasses import astuple, dataclass
from typing import Any

import numpy as np

from tree_rl.cost.cost_model import CostModel

LEAST_EQUATIONS = 5
"""Fewest updates for a fit."""
MOST_EQUATIONS = 64
PRIOR_WEIGHT = 0.02
"""Weight of the prior in squared relative errors; coefficients that the updates do not determine stay near it."""
LEAST_SPREAD = 0.02
"""Relative error up to which an update has full weight, at least; larger errors get less weight."""
ROUNDS = 12


@dataclass(frozen=True, kw_only=True, slots=True)
class Work:
    """Work of one update on one rank."""

    forwards: float
    """Forwards: micro-batches that run whole, and partitions of the others."""
    tokens: float
    pairs: float
    """Visible (query, key) pairs."""
    head_tokens: float
    """Tokens for which the language-model head runs."""


class CostFit:
    """Learns seconds from measured updates; equal measurements give equal coefficients on every rank.

    Non-negative least squares on relative errors. Huber weights reduce the influence of outliers, such as the first
    updates of a shape, which compile kernels. A quadratic prior keeps the coefficients near those that the model's
    operation counts suggest.
    """

    def __init__(self, start: CostModel) -> None:
        """Start without measurements; `start` is the prior, from the model's shape, in any unit."""
        self._start = np.array([0.0, start.per_token, start.per_pair, start.per_head_token])
        self._equations: deque[tuple[float, ...]] = deque(maxlen=MOST_EQUATIONS)
        self.model: CostModel | None = None
        """The fitted cost model in seconds; None before `LEAST_EQUATIONS` updates."""

    def add(self, work: Work, seconds: float) -> None:
        """Learn from an update; updates without tokens or time are ignored."""
        if seconds > 0 and work.tokens > 0:
            self._equations.append((*astuple(work), seconds))
            self._fit()

    def state(self) -> dict[str, Any]:
        """Measurements, for a checkpoint."""
        return {"equations": [list(equation) for equation in self._equations]}

    def restore(self, state: dict[str, Any]) -> None:
        """Load measurements that `state` returned."""
        self._equations.clear()
        self._equations.extend(tuple(equation) for equation in state["equations"])
        self._fit()

    def _fit(self) -> None:
        if len(self._equations) < LEAST_EQUATIONS:
            self.model = None
            return
        table = np.array(self._equations)
        work_ET, seconds_E = table[:, :-1], table[:, -1]
        rate = float(np.median(seconds_E / (work_ET @ self._start)))
        # Scaled so that coefficients are about 1: by the prior, and the fixed part by the median time per forward.
        forward_seconds = float(np.median(seconds_E / np.maximum(work_ET[:, 0], 1)))
        unit_T = np.concatenate([[forward_seconds], rate * self._start[1:]])
        prior_T = np.array([0.0, 1.0, 1.0, 1.0])
        scaled_ET = work_ET * unit_T / seconds_E[:, None]
        found_T = prior_T
        for _ in range(ROUNDS):
            off_E = np.abs(scaled_ET @ found_T - 1)
            spread = max(LEAST_SPREAD, 1.5 * float(np.median(off_E)))
            weight_E = np.minimum(1.0, spread / np.maximum(off_E, 1e-12))
            found_T = _non_negative(scaled_ET, weight_E, prior_T)
        per_forward, per_token, per_pair, per_head_token = (found_T * unit_T).tolist()
        self.model = CostModel(
            per_forward=per_forward, per_token=per_token, per_pair=per_pair, per_head_token=per_head_token
        )


def _non_negative(scaled_ET: np.ndarray, weight_E: np.ndarray, prior_T: np.ndarray) -> np.ndarray:
    """Least-squares solution [T] with the prior and no negative entry: tries every set of entries that are zero."""
    terms = len(prior_T)
    normal_TT = (scaled_ET * weight_E[:, None]).T @ scaled_ET + PRIOR_WEIGHT * np.eye(terms)
    right_T = (scaled_ET * weight_E[:, None]).T @ np.ones(len(scaled_ET)) + PRIOR_WEIGHT * prior_T
    best, least = np.zeros(terms), 0.0
    for size in range(1, terms + 1):
        for picked in itertools.combinations(range(terms), size):
            index = list(picked)
            try:
                found = np.linalg.solve(normal_TT[np.ix_(index, index)], right_T[index])
            except np.linalg.LinAlgError:  # one absurd measurement can hide the prior below rounding
                continue
            # The objective at the stationary point, up to a constant.
            objective = -float(found @ right_T[index])
            if (found >= 0).all() and objective < least:
                best, least = np.zeros(terms), objective
                best[index] = found
    return best
