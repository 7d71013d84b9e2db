"""Before the first batch: compare the outputs of one group as a tree with those of the same rows without one."""

import logging
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace

import numpy as np
import torch
from torch import nn

from tree_rl.models.images import TOKENS
from tree_rl.training.context import StepCall, StepContext
from tree_rl.training.hand_overs import StepPlan
from tree_rl.training.loss.outputs import LOG_PROBS, VALUES
from tree_rl.training.micro_batch import MicroBatch
from tree_rl.training.ranks.lock_step import TOWER_FORWARD
from tree_rl.training.rows import Rows
from tree_rl.training.rows_alone import next_log_probs
from tree_rl.training.run import run_at_once, run_whole
from tree_rl.training.tower import Tower, idle_tower
from tree_rl.tree.forest import Forest
from tree_rl.tree.forest.jagged import positions_of_rows

logger = logging.getLogger(__name__)

MOST_ROWS = 8
MOST_TOKENS_ALONE = 4096
"""Most tokens of a row that runs alone: it has logits at every token, and its attention may need quadratic memory."""
MADE_UP_ROW = (0, 1, 1, 0, 1, 0, 0, 1)
"""Token ids that every vocabulary has."""
MEAN_TOLERANCE = {torch.float64: 1e-8, torch.float32: 1e-4, torch.bfloat16: 0.1, torch.float16: 2e-2}
"""Largest mean absolute difference over trained tokens. In half precision any two kernels differ by rounding: logits
between 64 and 128 have steps of 0.5 in bf16, so that rows alone differ as much between attention kernels."""


class TreeMismatchError(RuntimeError):
    """The tree forward of this model differs from its rows; training with it would be wrong."""


class SelfCheck:
    """The self-check of one step: once for its model, and once for the model without adapters."""

    def __init__(self, context: StepContext) -> None:
        self._context = context
        self.checked: set[bool] = set()
        """Models checked so far: True for the reference policy (without adapters), False for the trained model."""
        self.error: float | None = None
        """Largest difference found so far; None before the first check."""

    def run(self, plan: StepPlan) -> None:
        """Compare log-probs (or values) between tree and rows, in train mode, with two forwards on every rank.

        It compares rows of the plan that share a prefix, through the trainer's forward if the call has one, else one
        row alone. The last compared row gets a made-up sibling, so that there is always a branch. A row beyond the
        budget is cut, and a rank without rows makes one up. Every sequence-parallel rank runs all rows. If any rank has
        images, each forward comes after one of the tower, on every rank.

        Raises:
            TreeMismatchError: the mean difference exceeds the tolerance of the compute dtype.
        """
        context, call, has_tower = self._context, plan.call, TOWER_FORWARD in plan.schedule
        self.checked.add(call.is_reference)
        name = VALUES if VALUES in call.outputs else LOG_PROBS
        # The check fits where a micro-batch fits; rows without a tree are not split over the ranks that share tokens.
        most = min(plan.max_tokens, plan.max_flat_tokens) // context.sharing_ranks
        if context.always_forest or call.run_rows_flat is None or has_tower:
            most = min(most, MOST_TOKENS_ALONE)
        members = _rows_to_compare(plan.batches, call.rows, most)
        rows = _excerpt(call.rows, members) if members else _cut_row(call.rows, most)
        last = rows.num_rows - 1
        by_trainer = None if has_tower or not members else call.run_rows_flat
        # If packed rows see each other, only a row by itself is a valid reference, so a single row is compared.
        compared = [last] if by_trainer is None or context.always_forest else list(range(rows.num_rows))
        with torch.no_grad(), _train_mode(context.module, is_on=not call.trains):
            of_tree, forest = _as_tree(context, call, rows, most, name, has_tower=has_tower)
            if by_trainer is None:
                of_rows = _row_alone(context, rows, last, name, has_tower=has_tower)
            else:
                # Rows without a tree cannot replay routes, so in both forwards the routers choose.
                of_rows = by_trainer([members[row] for row in compared], None)[1][name]
        positions = torch.from_numpy(positions_of_rows(forest.row_index.offsets, compared))
        wanted = torch.from_numpy(rows.wanted_F[positions_of_rows(rows.offsets, compared)])
        if not torch.isfinite(of_rows.cpu()[wanted]).all():
            raise TreeMismatchError(
                f"self-check: {name} of rows that run without a tree are not finite; load a checkpoint whose weights "
                "are, or another dtype"
            )
        error = (of_tree[positions.to(of_tree.device)].float() - of_rows.float()).abs().cpu()[wanted]
        self.error = max(_judge(error, name, len(compared), context.compute_dtype), self.error or 0.0)


@contextmanager
def _train_mode(module: nn.Module, *, is_on: bool) -> Iterator[None]:
    """Train mode if `is_on`: some layers compute something else in training, and that is what must be checked."""
    modes = [(part, part.training) for part in module.modules()] if is_on else []
    if is_on:
        module.train()
    try:
        yield
    finally:
        for part, mode in modes:
            part.training = mode


def _as_tree(
    context: StepContext, call: StepCall, rows: Rows, max_tokens: int, name: str, *, has_tower: bool
) -> tuple[torch.Tensor, Forest]:
    """Outputs of the rows as one forest, with a made-up sibling before the end of the last row."""
    token_ids = [rows.token_ids(row) for row in range(rows.num_rows)]
    ids = token_ids[-1]
    spare = max_tokens - Forest.from_rows(token_ids, merge_key=rows.merge_keys(by_group=False)).num_unique
    # The sibling branch is one token longer than the row's tail, because the heavier subtree comes first. The tail has
    # at least two tokens, so that one of its tokens predicts another.
    tail = min(max(2, min(len(ids) // 2, spare - 1)), len(ids) - 1)
    cut = len(ids) - tail
    # The token at the cut comes twice, the first time with another id.
    copied = np.insert(np.arange(len(ids)), cut, cut)
    sibling = ids[copied]
    sibling[cut] = int(ids[cut] == 0)
    both = _excerpt(rows, range(rows.num_rows), sibling, copied)
    forest = Forest.from_rows([*token_ids, sibling], merge_key=both.merge_keys(by_group=False))
    batch = MicroBatch.of(both, range(both.num_rows), forest)
    if has_tower and batch.images is None:
        idle_tower(context)
    asked = replace(call, rows=both, loss=None, trains=False)
    # In both forwards the routers choose.
    return run_at_once(run_whole(replace(context, routers=None), asked, batch, None)).outputs[name], forest


def _row_alone(context: StepContext, rows: Rows, row: int, name: str, *, has_tower: bool) -> torch.Tensor:
    """Outputs of one row through the model as it was loaded, or as it reads images."""
    ids_1L = torch.from_numpy(rows.token_ids(row)).unsqueeze(0).to(context.device)
    positions_1L = torch.arange(ids_1L.shape[1], device=context.device).unsqueeze(0)
    images = {}
    if has_tower:
        forest = Forest.from_rows([rows.token_ids(row)])
        own = None if rows.images is None else rows.images.of_forest(forest, positions_of_rows(rows.offsets, [row]))
        if own is None:
            idle_tower(context)
        else:
            tower = Tower(context, own)
            tower.forward()
            positions_1L, images[TOKENS] = tower.tokens().on_device(context.device)
    logits_LV = context.forward(input_ids=ids_1L, position_ids=positions_1L, use_cache=False, **images).logits[0]
    if name == VALUES:
        return logits_LV[:, 0]
    return next_log_probs(logits_LV, ids_1L[0], float(rows.temperature_B[row]))


def _judge(error: torch.Tensor, name: str, num_rows: int, dtype: torch.dtype) -> float:
    mean, worst = float(error.mean()), float(error.max())
    if not np.isfinite(mean) or mean > MEAN_TOLERANCE[dtype]:
        raise TreeMismatchError(
            f"self-check: {name} of {num_rows} rows differ between tree and rows by {mean:.2e} on average "
            f"({worst:.2e} at most), above {MEAN_TOLERANCE[dtype]:.0e} for {dtype}; this model cannot train on trees "
            "exactly, or loses something where rows run without a tree: try "
            "model.override_config.attn_implementation=eager, else train with stock verl (model_type=language_model or "
            "value_model) and report the model type"
        )
    logger.info("self-check: %s of %d rows agree with rows run alone to %.2e (mean %.2e)", name, num_rows, worst, mean)
    return worst


def _excerpt(
    rows: Rows, members: Sequence[int], sibling: np.ndarray | None = None, copied: Sequence[int] | np.ndarray = ()
) -> Rows:
    """Some rows; one that trains nothing wants every next token. `sibling` is added and wants nothing; its tokens have
    the images and positions of the tokens `copied` of the last row."""
    token_ids = [rows.token_ids(row) for row in members]
    extra = [] if sibling is None else [sibling]
    found = Rows.of([*token_ids, *extra])
    wanted_F = np.zeros_like(found.wanted_F)
    for index, row in enumerate(members):
        place = slice(found.offsets[index], found.offsets[index + 1])
        trained = rows.wanted_F[rows.offsets[row] : rows.offsets[row + 1]]
        wanted_F[place] = trained if trained.any() else found.wanted_F[place]
    temperature_B = rows.temperature_B[[*members, *members[-1:]][: found.num_rows]]
    flat = [positions_of_rows(rows.offsets, members), rows.offsets[members[-1]] + np.asarray(copied, dtype=np.int64)]
    images = None if rows.images is None else rows.images.take(np.concatenate(flat))
    return replace(found, wanted_F=wanted_F, counted_F=wanted_F, temperature_B=temperature_B, images=images)


def _cut_row(rows: Rows, max_tokens: int) -> Rows:
    """The first row with at least two tokens, cut so that a sibling fits too; `MADE_UP_ROW` if there is none."""
    lengths = np.diff(rows.offsets)
    found = np.flatnonzero(lengths > 1)
    if not len(found):
        return Rows.of([MADE_UP_ROW])
    row = int(found[0])
    begin = Rows.of([rows.token_ids(row)[: max(2, 2 * max_tokens // 3)]])
    return replace(begin, temperature_B=rows.temperature_B[[row]])


def _rows_to_compare(micro_batches: Sequence[MicroBatch], rows: Rows, max_tokens: int) -> list[int]:
    """A few rows of the smallest forest in which rows share tokens, else of the smallest micro-batch.

    Neighbours in depth-first order, which share most, as many as fit; none if not even the first one fits.
    """
    lengths = np.diff(rows.offsets)
    usable = [batch for batch in micro_batches if lengths[list(batch.rows)].max() > 1]
    if not usable:
        return []
    sharing = [batch for batch in usable if batch.forest is not None and batch.unique_tokens < batch.flat_tokens]
    smallest = min(sharing or usable, key=lambda batch: batch.flat_tokens)
    order = range(len(smallest.rows)) if smallest.forest is None else smallest.forest.row_order.rows
    members = [row for row in (smallest.rows[index] for index in order) if lengths[row] > 1][:MOST_ROWS]
    return members[: int((np.cumsum(lengths[members]) <= max_tokens).sum())]
