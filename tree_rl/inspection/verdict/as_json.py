"""Results of `inspect` and `plan` as JSON objects, with the fields in docs/inspect.md.

Field names are stable; a change of meaning increases `FORMAT`.
"""

import json
from collections.abc import Iterable, Mapping
from dataclasses import asdict
from typing import Any

from tree_rl import __version__
from tree_rl.cost.cluster.split import Split, seconds_in_turns
from tree_rl.cost.cost_model import ModelShape
from tree_rl.inspection.overlap_by_group import GroupReport
from tree_rl.inspection.run_plan import GroupRun, RunPlan
from tree_rl.inspection.scale.predict_scale import Scaled
from tree_rl.inspection.verdict.judgement import Verdict
from tree_rl.inspection.verdict.prediction import UpdatePrediction

FORMAT = 2
"""Version of all objects."""


def inspected(
    reports: list[GroupReport], total: GroupReport, merged: GroupReport, shape: ModelShape, verdict: Verdict
) -> str:
    """`tree-rl inspect --json`."""
    needed = verdict.needed_share
    return _written(
        "inspect",
        taken=[asdict(taken) for taken in verdict.recording.taken],
        groups=[_group(report, shape) for report in reports],
        total=_group(total, shape),
        merged=_group(merged, shape),
        group_by=[asdict(one) for one in verdict.regrouped],
        verdict={
            "helps": verdict.helps,
            "trains": verdict.trains,
            "equal_rows": verdict.equal_rows,
            "prefix_rows": verdict.prefix_rows,
            "update_speed_up": verdict.update,
            "step_speed_up": verdict.step,
            "update_shares": verdict.share.shares,
            "update_shares_from": verdict.share.source,
            "update_share_needed": needed if needed <= 1 else None,
            "memory": None if verdict.memory is None else asdict(verdict.memory),
            "next": verdict.next_command,
        },
        prediction=None if verdict.update_prediction is None else _prediction(verdict.update_prediction),
    )


def planned(plan: RunPlan) -> str:
    """`tree-rl plan --json`."""
    return _written(
        "plan",
        max_tokens=plan.max_tokens,
        tree_forwards=len(plan.whole) + len(plan.beyond) + sum(part.num_partitions for part in plan.partitioned),
        row_forwards=len(plan.flat) + len(plan.oversized_rows),
        rows_over_the_budget=len(plan.oversized_rows),
        groups=[_run(group) for group in plan.groups],
    )


def scaled(steps: Iterable[Scaled], said: Iterable[str]) -> str:
    """`tree-rl plan --ranks --json`."""
    return _written("plan --ranks", steps=[_step(one) for one in steps], notes=list(said))


def divided(splits: Mapping[str, Split], said: Iterable[str]) -> str:
    """`tree-rl plan --cluster --json` without a model."""
    return _written("plan --cluster", **{name: _split(one) for name, one in splits.items()}, notes=list(said))


def _written(command: str, **fields: Any) -> str:
    """One line of ASCII, so that text from a file cannot move the cursor."""
    head = {"format": FORMAT, "command": command, "tree_rl": __version__}
    return json.dumps({**head, **fields}, allow_nan=False)


def _group(report: GroupReport, shape: ModelShape) -> dict[str, Any]:
    overlap = report.overlap
    return {
        "name": report.name,
        "rows": overlap.paths,
        "trees": report.trees,
        "unique_tokens": overlap.unique_tokens,
        "flat_tokens": overlap.flat_tokens,
        "por": overlap.por,
        "token_bound": overlap.token_bound,
        "flop_bound": shape.flop_bound(overlap),
        "depth": overlap.depth,
        "branches": {str(cause): count for cause, count in report.causes.items()},
    }


def _run(group: GroupRun) -> dict[str, Any]:
    plan, choice = group.partitions, group.choice
    return {
        "name": group.name,
        "rows": group.num_rows,
        "unique_tokens": group.unique_tokens,
        "partitions": None if plan is None else plan.num_partitions,
        "relayed_tokens": None if plan is None else plan.relayed_tokens,
        "runs_as": None if choice is None else choice.name,
        "gpu_bytes": None if choice is None else choice.peak.device,
        "host_bytes": None if choice is None else choice.peak.host,
    }


def _step(one: Scaled) -> dict[str, Any]:
    return {
        "gpus": one.model.cluster.gpus,
        "sp": one.model.sharing,
        "seconds": one.time.total,
        **{f"{cause}_seconds": seconds for cause, seconds in asdict(one.time).items()},
        "imbalance": one.layout.imbalance,
        "gpu_bytes": one.memory,
        "slowed_by": one.slowed_by or None,
    }


def _split(split: Split) -> dict[str, Any]:
    return {
        "rollout_gpus": split.rollout_gpus,
        "training_gpus": split.training_gpus,
        "seconds": split.step,
        "rollout_idle": split.rollout_idle,
        "training_idle": split.training_idle,
        "gpu_seconds": split.gpu_seconds,
        "seconds_in_turns": seconds_in_turns(split.load, split.rollout_gpus + split.training_gpus),
    }


def _prediction(update: UpdatePrediction) -> dict[str, Any]:
    return {
        "rows": {"update_seconds": update.rows.total},
        "trees": {"update_seconds": update.trees.total},
        "update_speed_up": update.speed_up,
        "gpu_price": update.price,
        "steps": [
            {
                "update_share": step.share,
                "speed_up": step.speed_up,
                **{
                    name: {"seconds": seconds, "price": price}
                    for name, seconds, price in zip(("rows", "trees"), step.seconds, step.price, strict=True)
                },
            }
            for step in update.steps
        ],
    }
