"""The cost model in seconds, fitted to measured updates: a fixed part per forward, tokens, visible pairs, head rows.

A model's experts and recurrent layers cost the same for each of its tokens, so they are part of a token's seconds.
Legend: E equations, one for each measured update; T terms.
"""

import itertools
from collections import deque
from dataclasses import astuple, dataclass
from typing import Any

import numpy as np

from tree_rl.cost.cost_model import CostModel

LEAST_EQUATIONS = 5
"""Fewer say too little to replace the model's shape."""
MOST_EQUATIONS = 64
PRIOR_WEIGHT = 0.02
"""Weight of the starting coefficients, in squared relative errors: what the updates do not tell apart stays near
them."""
LEAST_SPREAD = 0.02
"""Updates that are off by less than this share count in full; others the less, the further off they are."""
ROUNDS = 12


@dataclass(frozen=True, kw_only=True, slots=True)
class Work:
    """What an update computes on one rank."""

    forwards: float
    """Micro-batches, each of their partitions for itself."""
    tokens: float
    pairs: float
    """Visible (query, key) pairs."""
    head_tokens: float
    """Positions of the language-model head."""


class CostFit:
    """Seconds of an update, learnt from measured ones; equal measurements give equal coefficients everywhere.

    Non-negative least squares on relative errors, with weights that outliers lose (Huber), as the first updates of a
    shape compile kernels; a quadratic prior holds each coefficient near what the model's operations say.
    """

    def __init__(self, start: CostModel) -> None:
        """Know nothing yet.

        Args:
            start: of the model's shape, in any unit of work.
        """
        self._start = np.array([0.0, start.per_token, start.per_pair, start.per_head_token])
        self._equations: deque[tuple[float, ...]] = deque(maxlen=MOST_EQUATIONS)
        self._model: CostModel | None = None

    @property
    def model(self) -> CostModel | None:
        """In seconds; None before `LEAST_EQUATIONS` updates were measured."""
        return self._model

    def add(self, work: Work, seconds: float) -> None:
        """Learn from an update; one without work or time says nothing."""
        if seconds > 0 and work.tokens > 0:
            self._equations.append((*astuple(work), seconds))
            self._fit()

    def state(self) -> dict[str, Any]:
        """What it knows, for a checkpoint."""
        return {"equations": [list(equation) for equation in self._equations]}

    def restore(self, state: dict[str, Any]) -> None:
        """Know what `state` returned."""
        self._equations.clear()
        self._equations.extend(tuple(equation) for equation in state["equations"])
        self._fit()

    def _fit(self) -> None:
        if len(self._equations) < LEAST_EQUATIONS:
            self._model = None
            return
        table = np.array(self._equations)
        work_ET, seconds_E = table[:, :-1], table[:, -1]
        rate = float(np.median(seconds_E / (work_ET @ self._start)))
        # In units of the start, so that every coefficient is about 1; the fixed part in those of a forward's mean time.
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
        self._model = CostModel(
            per_forward=per_forward, per_token=per_token, per_pair=per_pair, per_head_token=per_head_token
        )


def _non_negative(scaled_ET: np.ndarray, weight_E: np.ndarray, prior_T: np.ndarray) -> np.ndarray:
    """The least squares solution [T] with the prior and no negative entry: the best of all sets of entries at 0."""
    terms = len(prior_T)
    normal_TT = (scaled_ET * weight_E[:, None]).T @ scaled_ET + PRIOR_WEIGHT * np.eye(terms)
    right_T = (scaled_ET * weight_E[:, None]).T @ np.ones(len(scaled_ET)) + PRIOR_WEIGHT * prior_T
    best, least = np.zeros(terms), 0.0
    for size in range(1, terms + 1):
        for picked in itertools.combinations(range(terms), size):
            index = list(picked)
            found = np.linalg.solve(normal_TT[np.ix_(index, index)], right_T[index])
            # The objective at a stationary point, less a constant.
            objective = -float(found @ right_T[index])
            if (found >= 0).all() and objective < least:
                best, least = np.zeros(terms), objective
                best[index] = found
    return best
