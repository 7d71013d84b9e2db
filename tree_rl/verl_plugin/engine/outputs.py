"""What an engine call returns to verl: outputs in the order of the rows, losses, metrics that every rank shares."""

from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed

from tree_rl.verl_plugin.compat import AggregationType, Metric, append_to_dict
from tree_rl.verl_plugin.engine.micro_batches import MicroBatch


def collect_outputs(
    outputs: Sequence[dict[str, Any]],
    micro_batches: Sequence[MicroBatch],
    num_rows: int,
    group: torch.distributed.ProcessGroup | None,
) -> dict[str, Any]:
    """Join the outputs of micro-batches as verl's `postprocess_batch_func` does.

    Args:
        outputs: verl's dict of each micro-batch.
        micro_batches: in the same order.
        num_rows: rows of the call.
        group: data-parallel group.

    Returns:
        `model_output` (nested, [num_rows, L]), `loss` (list) and `metrics`.
    """
    metrics: dict[str, Any] = {}
    for output in outputs:
        append_to_dict(metrics, output.get("metrics", {}))
    return {
        "model_output": _in_row_order(outputs, micro_batches, num_rows),
        "loss": [output["loss"] for output in outputs if "loss" in output],
        "metrics": _even_out(metrics, len(outputs), group),
    }


def plan_metrics(micro_batches: Sequence[MicroBatch], dp_size: int) -> dict[str, Metric]:
    """`tree/*` of one engine call. verl averages sums over ranks, hence the factor dp_size: totals over all ranks."""
    sums = {
        "tree/unique_tokens": sum(batch.unique_tokens for batch in micro_batches),
        "tree/flat_tokens": sum(batch.flat_tokens for batch in micro_batches),
        "tree/partitions": sum(1 if batch.plan is None else batch.plan.num_partitions for batch in micro_batches),
        "tree/relayed_tokens": sum(0 if batch.plan is None else batch.plan.relayed_tokens for batch in micro_batches),
    }
    metrics = {key: Metric(AggregationType.SUM, float(value * dp_size)) for key, value in sums.items()}
    metrics["tree/micro_batches"] = Metric(AggregationType.SUM, float(len(micro_batches)))
    return metrics


def _in_row_order(
    outputs: Sequence[dict[str, Any]], micro_batches: Sequence[MicroBatch], num_rows: int
) -> dict[str, torch.Tensor]:
    rows: dict[str, list[torch.Tensor]] = {}
    for output, batch in zip(outputs, micro_batches, strict=True):
        for key, nested in output.get("model_output", {}).items():
            column = rows.setdefault(key, [torch.empty(0)] * num_rows)
            for row, values in zip(batch.rows, nested.unbind(), strict=True):
                column[row] = values
    return {key: torch.nested.as_nested_tensor(column, layout=torch.jagged) for key, column in rows.items()}


def _even_out(metrics: dict[str, Any], count: int, group: torch.distributed.ProcessGroup | None) -> dict[str, Any]:
    """verl joins metrics across ranks value by value: give a rank with fewer micro-batches neutral values."""
    world = torch.distributed.get_world_size(group)
    if world == 1:
        return metrics
    mine = {key: value.aggregation for key, value in metrics.items() if isinstance(value, Metric)}
    plain = [key for key, value in metrics.items() if not isinstance(value, Metric)]
    gathered: list[Any] = [None] * world
    torch.distributed.all_gather_object(gathered, (count, mine, plain), group=group)
    missing = max(others for others, _, _ in gathered) - count
    for _, aggregations, plain_keys in gathered:
        for key, aggregation in aggregations.items():
            metrics.setdefault(key, Metric(aggregation))
        for key in plain_keys:
            metrics.setdefault(key, [])
    for value in metrics.values():
        if isinstance(value, Metric) and missing:
            neutral = 0.0 if value.aggregation == AggregationType.SUM or not value.values else value.aggregate()
            value.extend([float(neutral)] * missing)
    return metrics
