"""Before the first batch: one group as a tree against the same rows without one. Never wrong by surprise."""

import logging
from collections.abc import Callable, Sequence
from dataclasses import replace

import numpy as np
import torch

from tree_rl.training.context import StepCall, StepContext
from tree_rl.training.loss.outputs import LOG_PROBS, VALUES, EdgeOutputs
from tree_rl.training.micro_batch_runs import run_forest
from tree_rl.training.planning.micro_batches import MicroBatch
from tree_rl.tree.forest import Forest
from tree_rl.tree.forest.jagged import positions_of_rows

logger = logging.getLogger(__name__)

MOST_ROWS = 8
MEAN_TOLERANCE = {torch.float64: 1e-8, torch.float32: 1e-4, torch.bfloat16: 5e-2, torch.float16: 2e-2}
"""Mean absolute difference over trained tokens; half precision differs by rounding between any two kernels."""


class TreeMismatchError(RuntimeError):
    """The tree forward of this model differs from its rows; training on it would be wrong."""


def run_self_check(
    context: StepContext,
    call: StepCall,
    micro_batches: Sequence[MicroBatch],
    *,
    max_tokens: int,
    idle_forward: Callable[[], torch.Tensor],
) -> float:
    """Largest absolute difference of log-probs (values) between tree and rows; ranks without a tree keep step.

    Ranks that share a forest's tokens all run all rows: through the host, or as a forest that merges none of them.

    Args:
        context: the model and its host.
        call: whose rows are compared; it says how rows run without a tree, unless ranks share tokens.
        micro_batches: the plan of this call.
        max_tokens: most tokens of the compared rows together, so that the check fits where a micro-batch fits.
        idle_forward: keeps FSDP's collectives in step where nothing is compared.

    Returns:
        The largest absolute difference over trained tokens; 0 on a rank that had nothing to compare.

    Raises:
        TreeMismatchError: the mean difference exceeds the tolerance of the compute dtype.
    """
    rows, ranks = call.rows, context.ranks
    assert call.flat_rows is not None or ranks is not None
    name = VALUES if VALUES in call.outputs else LOG_PROBS
    with torch.no_grad():
        members = _rows_to_compare(micro_batches, max_tokens)
        if not members:
            idle_forward()
            idle_forward()
            return 0.0
        forest = Forest.from_rows([rows.token_ids(row) for row in members])
        # Rows without a tree replay no routes: both sides let the routers choose.
        asked = replace(call, rows=replace(rows, routes_FLK=None), loss=None, trains=False)
        of_tree = run_forest(context, asked, members, forest, ranks=ranks).present()[name]
        # Where packed rows see each other only a row alone is a yardstick, and one forward is due.
        is_alone = call.flat_rows is not None and context.leaks_when_packed
        compared = [len(members) - 1] if is_alone else list(range(len(members)))
        flat = _without_tree(context, asked, [members[row] for row in compared])
    positions = positions_of_rows(forest.row_index.offsets, compared)
    wanted = torch.from_numpy(rows.wanted_F[rows.flat_positions([members[row] for row in compared])])
    of_rows = flat.present()[name].float()
    error = (of_tree[torch.from_numpy(positions).to(of_tree.device)].float() - of_rows).abs().cpu()[wanted]
    return _judge(error, name, len(members), context.compute_dtype) if len(error) else 0.0


def _without_tree(context: StepContext, call: StepCall, members: Sequence[int]) -> EdgeOutputs:
    """Outputs of rows that share nothing, on this rank alone."""
    if call.flat_rows is not None:
        return call.flat_rows(members, None)[1]
    apart = Forest.from_rows([call.rows.token_ids(row) for row in members], merge_key=list(members))
    return run_forest(context, call, members, apart, ranks=None)


def _judge(error: torch.Tensor, name: str, num_rows: int, dtype: torch.dtype) -> float:
    mean, worst = float(error.mean()), float(error.max())
    if not np.isfinite(mean) or mean > MEAN_TOLERANCE[dtype]:
        raise TreeMismatchError(
            f"self-check: {name} of {num_rows} rows differ between tree and rows by {mean:.2e} on average "
            f"({worst:.2e} at most), above {MEAN_TOLERANCE[dtype]:.0e} for {dtype}; this model cannot train on trees "
            "exactly. Report the model type, or train flat with tree.mode=flat"
        )
    logger.info("self-check: %s of %d rows agree with rows run alone to %.2e (mean %.2e)", name, num_rows, worst, mean)
    return worst


def _rows_to_compare(micro_batches: Sequence[MicroBatch], max_tokens: int) -> list[int]:
    """A few rows of the smallest forest in which rows share tokens, or of the smallest forest at all.

    Neighbours in depth-first order, which share most, as many as fit; none where not even the first one fits.
    """
    forests = [(batch.rows, batch.forest) for batch in micro_batches if batch.forest is not None]
    if not forests:
        return []
    sharing = [(rows, forest) for rows, forest in forests if forest.num_unique < forest.num_flat]
    rows, smallest = min(sharing or forests, key=lambda pair: pair[1].num_flat)
    order = smallest.row_order.rows[:MOST_ROWS]
    fitting = int((np.cumsum(smallest.row_index.lengths[order]) <= max_tokens).sum())
    return [rows[row] for row in order[:fitting]]
