"""Before the first batch: one group as a tree against the same rows through stock verl. Never wrong by surprise."""

import logging
from dataclasses import replace
from typing import Any

import numpy as np
import torch
from tensordict import TensorDict

from tree_rl.tree.forest import Forest
from tree_rl.verl_plugin.compat import tensordict_utils as tu
from tree_rl.verl_plugin.engine.micro_batches import MicroBatch
from tree_rl.verl_plugin.engine.rows import Rows

logger = logging.getLogger(__name__)

MOST_ROWS = 8
MEAN_TOLERANCE = {torch.float32: 1e-4, torch.bfloat16: 5e-2, torch.float16: 2e-2}
"""Mean absolute difference over trained tokens; half precision differs by rounding between any two kernels."""


class TreeMismatchError(RuntimeError):
    """The tree forward of this model differs from its rows; training on it would be wrong."""


def run_self_check(
    engine: Any, data: TensorDict, rows: Rows, micro_batches: list[MicroBatch], max_tokens: int
) -> float:
    """Largest absolute difference of log-probs (values) between tree and rows; ranks without a tree keep step.

    Args:
        engine: a tree engine with its model built.
        data: the rows as verl handed them over.
        rows: the same, read.
        micro_batches: the plan of this call.
        max_tokens: most tokens of the rows together, so that the check fits where a micro-batch fits.

    Returns:
        The largest absolute difference over trained tokens; 0 on a rank that had nothing to compare.

    Raises:
        TreeMismatchError: the mean difference exceeds the tolerance of the compute dtype.
    """
    with torch.no_grad():
        members = _rows_to_compare(micro_batches, max_tokens)
        if not members:
            engine.idle_step()
            engine.idle_step()
            return 0.0
        selected = tu.index_select_tensor_dict(data, members)
        forest = Forest.from_rows([rows.token_ids(row) for row in members])
        # Stock verl replays no routes: both sides let the routers choose.
        _, tree = engine.tree_step(selected, replace(rows, routes_FLK=None), members, forest)
        # Stock verl packs rows; where they then see each other only a row alone is a yardstick, and one forward is due.
        compared = [len(members) - 1] if engine.leaks_when_packed else list(range(len(members)))
        _, flat = engine.stock_step(tu.index_select_tensor_dict(selected, compared))
    key = "log_probs" if "log_probs" in tree["model_output"] else "values"
    of_row = tree["model_output"][key].unbind()
    of_tree = torch.cat([of_row[row] for row in compared])
    wanted = torch.from_numpy(rows.wanted_F[rows.flat_positions([members[row] for row in compared])])
    trained = (of_tree.float() - flat["model_output"][key].values().float()).abs().cpu()[wanted]
    if not len(trained):
        return 0.0
    mean, worst = float(trained.mean()), float(trained.max())
    dtype = engine.compute_dtype
    if not np.isfinite(mean) or mean > MEAN_TOLERANCE[dtype]:
        raise TreeMismatchError(
            f"self-check: {key} of {len(members)} rows differ between tree and rows by {mean:.2e} on average "
            f"({worst:.2e} at most), above {MEAN_TOLERANCE[dtype]:.0e} for {dtype}; this model cannot train on trees "
            "exactly. Report the model type, or train flat with tree.mode=flat"
        )
    logger.info("self-check: %s of %d rows agree with stock verl to %.2e (mean %.2e)", key, len(members), worst, mean)
    return worst


def _rows_to_compare(micro_batches: list[MicroBatch], max_tokens: int) -> list[int]:
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
