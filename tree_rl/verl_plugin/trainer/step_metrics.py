"""`tree/*` metrics of a step: overlap of the rows, balance, staleness, sessions, and figures of the engine.

Legend: B rows, G groups (one per prompt).
"""

from collections.abc import Mapping, Sequence
from dataclasses import fields
from typing import Any

import numpy as np
import torch

from tree_rl.cost.balance.batch import BatchLayout
from tree_rl.cost.balance.paths import GroupPaths
from tree_rl.cost.cost_model import CostModel
from tree_rl.training.self_check import MEAN_TOLERANCE
from tree_rl.tree.report.counted import counted
from tree_rl.verl_plugin.compat import Metric
from tree_rl.verl_plugin.engine.outputs_back import COST
from tree_rl.verl_plugin.trainer.sessions import Sessions

ENGINE_FIGURES = ("partitions", "relayed_tokens", "micro_batches", "plan_seconds", "self_check_error", "cost_error")
"""Names of the engine's metrics besides token counts, without the prefix `tree/`."""
SCORE = "tree/session_score/mean"
COUNTS = (
    *("tree/sessions", "tree/unique_tokens", "tree/flat_tokens", "tree/untrained_rows", "tree/untrained_row_tokens"),
    *("tree/padding_rows", "tree/split_groups", "tree/repeated_tokens"),
    *("rollout/generated_tokens", "rollout/replayed_calls", "rollout/unforked_sessions"),
)
"""Metrics of an update that a step adds up."""
MEANS = {
    SCORE: "tree/sessions",
    "tree/paths_per_session/mean": "tree/sessions",
    "tree/por": "tree/flat_tokens",
    "tree/token_bound": "tree/unique_tokens",
}
"""Metrics that a step averages over its updates, and the counts that weigh them."""

NORMAL_ERRORS = (
    "normal: below 1e-5 in float32, 1 in bf16; "
    f"a mean above {MEAN_TOLERANCE[torch.float32]:g} or {MEAN_TOLERANCE[torch.bfloat16]:g} ends the run"
)


def overlap_metrics(groups: Sequence[GroupPaths], sessions: Sessions) -> dict[str, float]:
    """Metrics of the overlap in a batch; `sessions` are those of the real rows."""
    orders = [group.order for group in groups]
    unique, flat = sum(order.num_unique for order in orders), sum(int(order.lengths.sum()) for order in orders)
    paths = [len(rows) for rows in sessions.rows_of_session]
    return {
        "tree/unique_tokens": float(unique),
        "tree/flat_tokens": float(flat),
        "tree/por": 1.0 - unique / flat,
        "tree/token_bound": flat / unique,
        "tree/depth": float(max(order.lengths.max() for order in orders)),
        "tree/paths_per_session/mean": float(np.mean(paths)),
        "tree/paths_per_session/max": float(max(paths)),
        "tree/sessions": float(len(sessions)),
    }


def balance_metrics(layout: BatchLayout) -> dict[str, float]:
    """Metrics of the predicted balance of the ranks, and its cost."""
    return {
        "tree/imbalance": layout.imbalance,
        "tree/imbalance_bound": layout.least_imbalance,
        "tree/split_groups": float(layout.split_groups),
        "tree/repeated_tokens": float(layout.repeated_tokens),
        "tree/padding_rows": float(len(layout.order) - layout.num_rows),
    }


def explained_layout(metrics: Mapping[str, Any], *, ranks: int, sharing: int) -> str:
    """One line that explains, from the step's metrics, how it ran on the ranks, of `sharing` GPUs each."""
    on = counted(ranks, "rank") + (f" of {sharing} GPUs that share tokens" if sharing > 1 else "")
    saved = metrics.get("tree/realised_saving")
    kind = "rows" if saved == 0 else "trees" if saved is None else f"trees, {saved:.0%} of the tokens saved"
    split, repeated = int(metrics["tree/split_groups"]), int(metrics["tree/repeated_tokens"])
    layout = (
        f"{counted(split, 'group')} split, {counted(repeated, 'token')} computed again" if split else "whole groups"
    )
    found, bound = metrics["tree/imbalance"], metrics["tree/imbalance_bound"]
    parts = [f"{on}: {kind}", layout, f"slowest rank {found:.2f} times the mean, {bound:.2f} at best"]
    if metrics.get("tree/partitions") and metrics.get("tree/micro_batches"):
        forwards, batches = round(metrics["tree/partitions"]), round(metrics["tree/micro_batches"])
        parts.append(f"{counted(forwards, 'forward')} for {counted(batches, 'micro-batch')}")
    if metrics.get("tree/cost_error") is not None:
        parts.append(f"predicted time off by {metrics['tree/cost_error']:.1%}")
    return "layout: " + "; ".join(parts)


def first_batch(metrics: Mapping[str, Any]) -> str:
    """One line after the first update: the overlap of the rows, and the error of the self-check."""
    por, bound = metrics["tree/por"], metrics["tree/token_bound"]
    shared = f"first batch: POR {por:.2f}, updates at most {bound:.1f} times as fast by tokens"
    error = metrics.get("tree/self_check_error")
    if not error:
        return f"{shared}; self-check: nothing was compared"
    return f"{shared}; self-check: log-probs differ by {error:.1e} at most ({NORMAL_ERRORS})"


def staleness_metrics(
    tags: Sequence[Mapping[str, Any]], group_of_row: np.ndarray, *, trainer_version: int
) -> dict[str, float]:
    """Metrics of the rows' staleness, in versions of the weights, and of trees with mixed versions.

    A version is the number of weight synchronisations before the tokens were sampled. verl's agent loops tag every row
    with the oldest and the newest version that generated a token of its session.

    Args:
        tags: B tags of verl's rows with `min_global_steps` and `max_global_steps`, None if a rollout server reports no
            versions.
        group_of_row: int [B], numbered 0 to G - 1; a group's rows share one tree.
        trainer_version: version of the weights that train on the batch.

    Returns:
        tree/staleness/oldest/* and tree/staleness/newest/*: trainer's version minus the row's, over rows;
        tree/mixed_version_rows: share of rows generated by several versions;
        tree/mixed_version_trees: share of groups whose rows come from several versions.
        Rows without versions do not count; empty if no row has any.
    """
    pairs = zip(group_of_row, tags, strict=True)
    found = [(group, tag.get("min_global_steps"), tag.get("max_global_steps")) for group, tag in pairs]
    known = [one for one in found if None not in one]
    if not known:
        return {}
    group_B, oldest_B, newest_B = np.array(known, dtype=np.int64).T
    of_groups = [group_B == group for group in np.unique(group_B)]
    metrics = {
        "tree/mixed_version_rows": float((newest_B > oldest_B).mean()),
        "tree/mixed_version_trees": float(np.mean([newest_B[of].max() > oldest_B[of].min() for of in of_groups])),
    }
    for name, version_B in (("oldest", oldest_B), ("newest", newest_B)):
        metrics[f"tree/staleness/{name}/mean"] = float((trainer_version - version_B).mean())
        metrics[f"tree/staleness/{name}/max"] = float((trainer_version - version_B).max())
    return metrics


def branching_metrics(tags: Sequence[Mapping[str, Any]], group_of_row: np.ndarray) -> dict[str, float]:
    """`tree/branches_per_session`, and sums of what the step's sessions generated, repeated and could not fork.

    Every tag of a row has the figures of its prompt, or none if its agent loop counts nothing.
    """
    by_prompt = {int(group): tag for group, tag in zip(group_of_row, tags, strict=True) if "prompt_branches" in tag}
    if not by_prompt:
        return {}
    names = ("branches", "first_sessions", "generated_tokens", "replayed_calls", "unforked_sessions")
    branches, first, *others = (float(sum(tag[f"prompt_{name}"] for tag in by_prompt.values())) for name in names)
    rollout = {f"rollout/{name}": value for name, value in zip(names[2:], others, strict=True)}
    return {"tree/branches_per_session": branches / max(1.0, first), **rollout}


def reward_rates(metrics: Mapping[str, float]) -> dict[str, float]:
    """`tree/reward_per_1000_*`: the sessions' rewards per 1,000 tokens that were generated, if the agent loop counts
    them, and that an update runs; from the step's other metrics."""
    reward = metrics[SCORE] * metrics["tree/sessions"]
    tokens = {"generated": metrics.get("rollout/generated_tokens"), "trained": metrics["tree/unique_tokens"]}
    return {f"tree/reward_per_1000_{name}_tokens": 1000 * reward / count for name, count in tokens.items() if count}


def totals_of_updates(updates: Sequence[Mapping[str, float]]) -> dict[str, float]:
    """Counts of a step with several updates as sums, and what the step would have as one update.

    verl averages over the updates whatever it does not know by name, weighted by their rows.
    """
    shared = set.intersection(*map(set, updates))
    totals = {name: sum(update[name] for update in updates) for name in COUNTS if name in shared}
    for name, count in MEANS.items():
        if {name, count} <= shared:
            totals[name] = sum(one[name] * one[count] for one in updates) / totals[count]
    if "tree/depth" in shared:
        totals["tree/depth"] = max(update["tree/depth"] for update in updates)
    return totals | (reward_rates(totals) if SCORE in totals else {})


def session_metrics(figures: Sequence[Mapping[str, float]]) -> dict[str, float]:
    """`tree/session/*`: mean of each figure, such as `drift_branches`, over the sessions that report it.

    Also `tree/prefix_hit_rate`, the share of prompt tokens that rollout servers had cached, if they report it.
    """
    names = sorted({name for session in figures for name in session})
    metrics = {
        f"tree/session/{name}": float(np.mean([session[name] for session in figures if name in session]))
        for name in names
    }
    asked, hits = metrics.get("tree/session/prefix_queries"), metrics.get("tree/session/prefix_hits")
    if asked and hits is not None:
        metrics["tree/prefix_hit_rate"] = hits / asked
    return metrics


def reduce_engine_metrics(metrics: dict[str, Any]) -> None:
    """Convert verl's `Metric`s, one per rank, to numbers and add `tree/realised_saving`, in place."""
    for key, value in metrics.items():
        of_ranks = value if isinstance(value, list) else [value]
        if of_ranks and isinstance(of_ranks[0], Metric):
            metrics[key] = float(Metric.aggregate_dp(of_ranks))
    ran, flat = metrics.get("tree/unique_tokens"), metrics.get("tree/flat_tokens")
    if ran is not None and flat:
        metrics["tree/realised_saving"] = 1.0 - ran / flat


def put_tree_metrics_last(metrics: dict[str, Any]) -> None:
    """Move the `tree/*` entries behind verl's, in place: a logger's line keeps the order of the entries."""
    for key in [key for key in metrics if key.startswith("tree/")]:
        metrics[key] = metrics.pop(key)


def fitted_cost(metrics: Mapping[str, Any]) -> CostModel | None:
    """The actor's fitted coefficients among a step's metrics; None if there are none."""
    found = {name: metrics.get(f"actor/{COST}{name}") for name in (field.name for field in fields(CostModel))}
    if any(value is None for value in found.values()):
        return None
    return CostModel(**{name: float(value) for name, value in found.items() if value is not None})


def update_metrics(metrics: Mapping[str, Any], role: str) -> dict[str, float]:
    """Figures of the engine for this step's update.

    Args:
        metrics: the step's metrics with the engine's `{role}/tree/unique_tokens` (tokens that it ran) and
            `{role}/tree/flat_tokens`, both including padding rows.
        role: "actor" or "critic".

    Returns:
        tree/realised_saving (share of the flat tokens that the engine did not run) and the `ENGINE_FIGURES`, for the
        critic as tree/critic_*. Empty if the engine reports no trees.
    """
    ran, flat = metrics.get(f"{role}/tree/unique_tokens"), metrics.get(f"{role}/tree/flat_tokens")
    if ran is None or not flat:
        return {}
    prefix = "tree/" if role == "actor" else f"tree/{role}_"
    kept = {name: float(metrics[f"{role}/tree/{name}"]) for name in ENGINE_FIGURES if f"{role}/tree/{name}" in metrics}
    kept["realised_saving"] = 1.0 - float(ran) / float(flat)
    return {prefix + name: value for name, value in kept.items()}
