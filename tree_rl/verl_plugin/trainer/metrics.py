"""`tree/*` metrics of a step: what the rows share, what the engine made of it, and outcomes per session.

Legend: B rows, S sessions.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from tree_rl.tree import Forest
from tree_rl.verl_plugin.compat import Metric
from tree_rl.verl_plugin.trainer.balance import workload
from tree_rl.verl_plugin.trainer.sessions import Sessions

ENGINE_FIGURES = ("partitions", "relayed_tokens", "micro_batches", "plan_seconds", "self_check_error")
"""Names after `tree/` in the engine's metrics that say something beside token counts."""


@dataclass(frozen=True, kw_only=True, slots=True)
class GroupOverlap:
    """What the rows of one prompt's group share."""

    unique_tokens: int
    """Tokens that the group's trees compute."""
    flat_tokens: int
    """Tokens that its rows contain."""
    cost: float
    """Work of the trees, on the scale of verl's `calculate_workload`."""
    depth: int
    """Tokens of the longest row."""


def measure_group(row_tokens: Sequence[np.ndarray]) -> GroupOverlap:
    """Measure a group from its rows' token ids."""
    forest = Forest.from_rows(row_tokens)
    pairs = float(forest.position.sum(dtype=np.float64)) + forest.num_unique
    return GroupOverlap(
        unique_tokens=forest.num_unique,
        flat_tokens=forest.num_flat,
        cost=float(workload(forest.num_unique, pairs)),
        depth=int(forest.row_index.lengths.max()),
    )


def overlap_metrics(groups: Sequence[GroupOverlap], sessions: Sessions, imbalance: float) -> dict[str, float]:
    """Metrics of the batch before it trains.

    Args:
        groups: one entry per prompt.
        sessions: sessions of the real rows.
        imbalance: of the layout: slowest rank over the mean.

    Returns:
        tree/por, tree/unique_tokens, tree/flat_tokens, tree/token_bound, tree/depth, tree/paths_per_session/*,
        tree/imbalance.
    """
    unique, flat = sum(group.unique_tokens for group in groups), sum(group.flat_tokens for group in groups)
    paths = [len(rows) for rows in sessions.rows_of_session]
    return {
        "tree/unique_tokens": float(unique),
        "tree/flat_tokens": float(flat),
        "tree/por": 1.0 - unique / flat,
        "tree/token_bound": flat / unique,
        "tree/depth": float(max(group.depth for group in groups)),
        "tree/paths_per_session/mean": float(np.mean(paths)),
        "tree/paths_per_session/max": float(max(paths)),
        "tree/sessions": float(len(sessions)),
        "tree/imbalance": imbalance,
    }


def reduce_tree_metrics(metrics: dict[str, Any]) -> None:
    """Turn the engine's `tree/*` entries, one per rank, into numbers, and add what follows from them; in place."""
    for key in [key for key in metrics if key.startswith("tree/")]:
        value = metrics[key]
        metrics[key] = float(Metric.aggregate_dp(value) if isinstance(value, list) else value.aggregate())
    ran, flat = metrics.get("tree/unique_tokens"), metrics.get("tree/flat_tokens")
    if ran is not None and flat:
        metrics["tree/realised_saving"] = 1.0 - ran / flat


def update_metrics(metrics: Mapping[str, Any], role: str) -> dict[str, float]:
    """What the engine made of this step's update: above all the share of the flat tokens that it did not run.

    Args:
        metrics: the step's metrics with the engine's `{role}/tree/unique_tokens` (tokens that it ran) and
            `{role}/tree/flat_tokens`; padding rows are in both.
        role: "actor" or "critic".

    Returns:
        tree/realised_saving, tree/partitions, tree/relayed_tokens, tree/micro_batches, tree/plan_seconds (over
        mini-batches) and
        tree/self_check_error of the actor; tree/critic_* of the critic. Empty where the engine reports no trees.
    """
    ran, flat = metrics.get(f"{role}/tree/unique_tokens"), metrics.get(f"{role}/tree/flat_tokens")
    if ran is None or not flat:
        return {}
    prefix = "tree/" if role == "actor" else f"tree/{role}_"
    kept = {name: float(metrics[f"{role}/tree/{name}"]) for name in ENGINE_FIGURES if f"{role}/tree/{name}" in metrics}
    kept["realised_saving"] = 1.0 - float(ran) / float(flat)
    return {prefix + name: value for name, value in kept.items()}
