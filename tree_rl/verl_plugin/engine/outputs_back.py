"""Converts a step's result to verl's: outputs in the order of the rows, losses, and metrics that all ranks have."""

import dataclasses
from typing import Any

import torch
import torch.distributed

from tree_rl.cost.memory.model import GIB
from tree_rl.training.hand_overs import StepResult
from tree_rl.training.routers.expert_load import LoadReport
from tree_rl.training.step import TreeStep
from tree_rl.verl_plugin.compat import AggregationType, Metric, append_to_dict
from tree_rl.verl_plugin.engine.verl_loss import as_model_output
from tree_rl.verl_plugin.options import ROUTES

COST = "tree/cost_s/"
"""Prefix of the metrics of fitted coefficients, in seconds."""


def as_verl_result(result: StepResult, step: TreeStep, offsets: torch.Tensor, *, keeps_outputs: bool) -> dict[str, Any]:
    """A step's result in the form of verl's `postprocess_batch_func`: `model_output`, `loss` (one per micro-batch) and
    `metrics`, among them the counters of the step that ran it.

    `offsets` (int64 [B + 1]) are those of the rows. A plain update does not read `model_output`, and keeps none.
    """
    context = step.context
    metrics: dict[str, Any] = {}
    for parts in result.metrics:
        for part in parts:
            append_to_dict(metrics, part)
    metrics = even_out(metrics, context.num_ranks, context.data_parallel)
    metrics |= _plan_metrics(result, step)
    if result.load is not None:
        metrics |= _load_metrics(result.load)
    model_output = {}
    if keeps_outputs:
        model_output = as_model_output(result.outputs, offsets)
        routes_FLK = result.routes_FLK
        if routes_FLK is not None:
            model_output[ROUTES] = torch.nested.nested_tensor_from_jagged(routes_FLK, offsets.to(routes_FLK.device))
    return {"model_output": model_output, "loss": list(result.losses), "metrics": metrics}


def _plan_metrics(result: StepResult, step: TreeStep) -> dict[str, Metric]:
    """`tree/*` of one engine call. verl averages sums over ranks with different rows; the factor makes them totals."""
    batches = result.micro_batches
    sums = {
        "tree/unique_tokens": sum(batch.unique_tokens for batch in batches),
        "tree/flat_tokens": sum(batch.flat_tokens for batch in batches),
        "tree/partitions": sum(batch.num_partitions for batch in batches),
        "tree/relayed_tokens": sum(0 if batch.plan is None else batch.plan.relayed_tokens for batch in batches),
        "tree/dummy_ops": step.dummy_ops,
    }
    factor = step.context.num_ranks // step.context.sharing_ranks
    metrics = {key: Metric(AggregationType.SUM, float(value * factor)) for key, value in sums.items()}
    peak = step.learner.budget.predicted(batches)
    if peak is not None:
        layers = max((batch.saving.offloaded_layers for batch in batches), default=0)
        metrics["tree/offloaded_layers"] = Metric(AggregationType.MAX, float(layers))
        metrics["tree/predicted_peak_gib"] = Metric(AggregationType.MAX, peak.device / GIB)
        metrics["tree/predicted_host_gib"] = Metric(AggregationType.MAX, peak.host / GIB)
    return (
        metrics
        | _cost_metrics(step)
        | {
            "tree/micro_batches": Metric(AggregationType.SUM, float(len(batches))),
            "tree/out_of_memory": Metric(AggregationType.MAX, float(step.out_of_memory)),
            "tree/plan_seconds": Metric(AggregationType.MAX, result.plan_seconds),
            "tree/self_check_error": Metric(AggregationType.MAX, step.self_check.error or 0.0),
        }
    )


def _cost_metrics(step: TreeStep) -> dict[str, Metric]:
    """`tree/cost_error` and the fitted coefficients, if they exist; the same on every rank."""
    fitted, error = step.learner.calls.fitted, step.learner.calls.error
    found = {} if fitted is None else {f"{COST}{name}": value for name, value in dataclasses.asdict(fitted).items()}
    if error is not None:
        found["tree/cost_error"] = error
    return {key: Metric(AggregationType.MAX, value) for key, value in found.items()}


def _load_metrics(load: LoadReport) -> dict[str, Metric]:
    """`moe/*` of an update; the same on every rank, except that each rank reports its share of sums."""
    metrics = {
        "moe/load_max_over_mean": Metric(AggregationType.MAX, load.max_over_mean),
        "moe/load_min_over_mean": Metric(AggregationType.MIN, load.min_over_mean),
        "moe/idle_experts": Metric(AggregationType.MAX, float(load.idle_experts)),
    }
    if load.aux_loss is not None:
        metrics["moe/aux_loss"] = Metric(AggregationType.SUM, load.aux_loss)
        metrics["moe/counted_anew"] = Metric(AggregationType.MAX, float(load.has_extra_pass))
    return metrics


def even_out(metrics: dict[str, Any], world: int, group: torch.distributed.ProcessGroup | None) -> dict[str, Any]:
    """Add neutral values where ranks report fewer than others, because verl joins metrics of ranks value by value.

    A rank may have fewer micro-batches, fewer path weights in one, or only padding rows, which have no metrics.
    """
    if world == 1:
        return metrics
    mine = {key: (value.aggregation, value.values) for key, value in metrics.items() if isinstance(value, Metric)}
    plain = [key for key, value in metrics.items() if not isinstance(value, Metric)]
    gathered: list[Any] = [None] * world
    torch.distributed.all_gather_object(gathered, (mine, plain), group=group)
    found: dict[str, list[Metric]] = {}
    for of_rank, plain_keys in gathered:
        for key, (aggregation, values) in of_rank.items():
            found.setdefault(key, []).append(metric_of(aggregation, values))
        for key in plain_keys:
            metrics.setdefault(key, [])
    for key, of_ranks in found.items():
        metric = metrics.setdefault(key, Metric(of_ranks[0].aggregation))
        missing = max(len(other.values) for other in of_ranks) - len(metric.values)
        metric.extend([_neutral(metric, of_ranks)] * missing)
    return metrics


def _neutral(metric: Metric, of_ranks: list[Metric]) -> float:
    """A value that does not change the joined metric: 0 in a sum, else this rank's aggregate, or that of the others."""
    if metric.aggregation == AggregationType.SUM:
        return 0.0
    if metric.values:
        return float(metric.aggregate())
    known = [float(other.aggregate()) for other in of_ranks if other.values]
    return float(metric_of(metric.aggregation, known).aggregate()) if known else 0.0


def metric_of(aggregation: AggregationType, values: list[float]) -> Metric:
    """verl's metric with these values."""
    metric = Metric(aggregation)
    metric.extend(values)
    return metric
