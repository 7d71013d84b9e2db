"""Plan: split rows into micro-batches within the token budget, and agree with all ranks on one schedule of ops.

Whole groups are packed into forests by unique tokens; groups in which a tree would not pay run without one.
"""

import time
from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from hashlib import blake2b
from typing import NoReturn

import numpy as np
import torch

from tree_rl.cost.cost_model import CostModel
from tree_rl.cost.memory.choice import Chooser
from tree_rl.cost.memory.model import MemorySaving
from tree_rl.models.sequence_parallel import SequenceParallel
from tree_rl.training.context import StepCall, StepContext
from tree_rl.training.hand_overs import StepPlan
from tree_rl.training.learn import Learner
from tree_rl.training.loss.outputs import LOG_PROBS
from tree_rl.training.memory_budget import NO_LIMIT
from tree_rl.training.micro_batch import MicroBatch
from tree_rl.training.partitioned import takes_preview, training_ops
from tree_rl.training.plan_cache import PlanCache
from tree_rl.training.ranks.lock_step import (
    BACKWARD,
    FORWARD,
    TOWER_BACKWARD,
    TOWER_FORWARD,
    SharedPlan,
    agree_on_ops,
)
from tree_rl.training.rows import Rows
from tree_rl.training.tree_options import GIVEN_WEIGHTINGS, TreeOptions
from tree_rl.tree.forest import Forest, RowError
from tree_rl.tree.packing import best_fit, pack_groups
from tree_rl.tree.weights import once_per_token_weights, session_weights, tree_mean_weights


class Planner:
    """Plans the calls of one step."""

    def __init__(self, context: StepContext, learner: Learner) -> None:
        self._context, self._learner = context, learner
        self._plans = PlanCache(is_shared=context.ranks is not None)
        # A failed rank cannot stand in for the gather of routes among sequence-parallel ranks.
        self._may_repeat = context.may_repeat and (context.ranks is None or context.routers is None)

    def plan(self, call: StepCall, options: TreeOptions, *, is_repeat: bool = False) -> StepPlan:
        """Split the rows into micro-batches and agree with all ranks on the ops, before any rank computes.

        Args:
            call: what to run.
            options: how rows become trees.
            is_repeat: True if the call ran out of memory before; it is not repeated a second time.

        Raises:
            RowError: a row cannot be trained on; the message names it.
            RuntimeError: another rank refused its rows, or sequence-parallel ranks have planned differently.
        """
        started = time.perf_counter()
        context, learner = self._context, self._learner
        is_routed = call.records_routes or call.rows.routes_FLK is not None
        runs_flat = call.run_rows_flat is not None and call.rows.images is None
        if not runs_flat or context.always_forest or is_routed or context.ranks is not None:
            options = replace(options, mode="tree")
        trainer_tokens = NO_LIMIT if call.trainer_tokens is None else call.trainer_tokens
        tokens = options.max_tokens if isinstance(options.max_tokens, int) else trainer_tokens
        # A budget learnt from memory, or halved after an error, overrides the others.
        max_tokens = tokens if learner.budget.tokens is None else learner.budget.tokens
        max_flat_tokens = min(trainer_tokens, learner.budget.most_flat_tokens)
        if not call.trains and options.path_weighting in GIVEN_WEIGHTINGS:
            options = replace(options, path_weighting="verl")
        try:
            batches = plan_micro_batches(
                call.rows,
                options,
                max_tokens,
                max_flat_tokens,
                learner.calls.model,
                self._plans,
                learner.budget.chooser(),
            )
        except RowError as error:
            self.refuse(error)
        for batch in batches:
            if batch.choice is not None:
                learner.budget.log_choice(batch.choice, batch.unique_tokens, max_tokens)
        known = tuple(None if batch.plan is None else self._known_log_probs(call, batch) for batch in batches)
        pairs = zip(batches, known, strict=True)
        ops = "".join(_ops_of_batch(call, batch, is_known=known_f is not None) for batch, known_f in pairs)
        # A repeat clears gradients. If an earlier call left some, the error is raised instead.
        is_first = not call.trains or all(parameter.grad is None for parameter in context.module.parameters())
        may_repeat = self._may_repeat and is_first and not is_repeat
        if context.num_ranks > 1:
            shared, measured = shared_plan(context.ranks, call.rows, batches), learner.calls.take_last()
            agreement = agree_on_ops(ops, context.data_parallel, may_repeat=may_repeat, shared=shared, payload=measured)
            if agreement.is_refused:
                raise RuntimeError("another data-parallel rank refused its rows; its own error names the row")
            learner.calls.learn(agreement.payloads)
            ops, may_repeat = agreement.schedule, agreement.may_repeat
        return StepPlan(
            call=call,
            max_tokens=max_tokens,
            max_flat_tokens=max_flat_tokens,
            batches=tuple(batches),
            known=known,
            schedule=ops,
            may_repeat=may_repeat,
            seconds=time.perf_counter() - started,
        )

    def counting_plan(self, plan: StepPlan) -> StepPlan:
        """A plan that runs the same micro-batches without gradients and loss; all ranks agree on it."""
        call = replace(plan.call, loss=None, trains=False)
        ops = "".join(_ops_of_batch(call, batch, is_known=False) for batch in plan.batches)
        if self._context.num_ranks > 1:
            ops = agree_on_ops(ops, self._context.data_parallel).schedule
        return replace(plan, call=call, known=(None,) * len(plan.batches), schedule=ops)

    def refuse(self, error: RowError) -> NoReturn:
        """Tell the other ranks that this one cannot read its rows, so that none of them waits; raises `error`."""
        if self._context.num_ranks > 1:
            agree_on_ops("", self._context.data_parallel, is_refused=True)
        raise error

    def _known_log_probs(self, call: StepCall, batch: MicroBatch) -> torch.Tensor | None:
        """`StepPlan.known` of one micro-batch that runs in partitions."""
        # An inference's log-probs are remembered, its other outputs are not.
        couples_others = call.outputs != (LOG_PROBS,) and not call.couples_log_probs_alone
        if not takes_preview(call, is_known=False) or couples_others or call.rows.candidates_FK is not None:
            return None
        known = self._learner.log_probs.recall(call.rows, batch.rows)
        return None if known is None else torch.cat(known)


def _ops_of_batch(call: StepCall, batch: MicroBatch, *, is_known: bool) -> str:
    """Ops of a micro-batch, in order; `is_known` is True if its rows' log-probs are known."""
    if batch.plan is None:
        ops = FORWARD + BACKWARD if call.trains else FORWARD
    else:
        infers = not call.trains or takes_preview(call, is_known=is_known)
        ops = FORWARD * batch.num_partitions if infers else ""
        ops += training_ops(batch.plan) if call.trains else ""
    if batch.images is not None:
        ops = TOWER_FORWARD + ops + (TOWER_BACKWARD if call.trains else "")
    return ops


def shared_plan(ranks: SequenceParallel | None, rows: Rows, batches: Sequence[MicroBatch]) -> SharedPlan | None:
    """Digest of this rank's rows and micro-batches; None without sequence parallelism.

    Ranks that share tokens compare it: with other plans they would mix tokens of different rows.
    """
    if ranks is None:
        return None
    digest = blake2b(digest_size=16)
    images = () if rows.images is None else (rows.images.image_F, rows.images.position_AF)
    for array in (rows.token_ids_F, rows.offsets, rows.wanted_F, *images):
        digest.update(array.tobytes())
    for batch in batches:
        digest.update(repr((batch.rows, batch.saving)).encode())
        if batch.plan is not None:
            digest.update(batch.plan.partition_of_token.tobytes())
    return tuple(torch.distributed.get_process_group_ranks(ranks.group)), digest.digest()


def plan_micro_batches(
    rows: Rows,
    options: TreeOptions,
    max_tokens: int,
    max_flat_tokens: int,
    cost: CostModel | None,
    plans: PlanCache,
    chooser: Chooser | None = None,
) -> list[MicroBatch]:
    """Split the rows of a call into micro-batches.

    Args:
        rows: all rows of this rank, possibly none.
        options: how rows become trees.
        max_tokens: most unique tokens of a forward.
        max_flat_tokens: most tokens of rows that run without a tree.
        cost: cost model for `mode: auto`; None runs every group as a tree.
        plans: cache of partition plans.
        chooser: chooses how a forest beyond the budget runs; None: in partitions within the budget.

    Returns:
        Forests beyond the budget, then whole forests, then flat micro-batches; every row is in exactly one.
    """
    if rows.num_rows == 0:
        return []
    by_uid = options.scope == "uid"
    token_ids = np.split(rows.token_ids_F, rows.offsets[1:-1])
    forest = Forest.from_rows(token_ids, merge_key=rows.merge_keys(by_group=by_uid))
    group_B = rows.group_B if by_uid else forest.tree_of_row
    groups = [np.flatnonzero(group_B == group) for group in np.unique(group_B)]
    # Routers are traced only in rows that run as a tree.
    always = options.mode == "tree" or options.router_aux_loss_coef is not None
    wanted = forest.row_index.with_values(rows.wanted_F)
    whole_groups, batches, flat_rows = [], [], []
    for group in groups:
        part = forest.select_rows(group)
        if not (always or cost is None or cost.tree_pays(part, wanted.select(group))):
            flat_rows += group.tolist()
        elif part.num_unique <= max_tokens:
            whole_groups.append(group)
        else:
            batch = MicroBatch.of(rows, group.tolist(), part)
            batches.append(_beyond_budget(batch, rows, max_tokens, options, plans, chooser))
    for packed in pack_groups(forest, whole_groups, max_tokens=max_tokens):
        batches.append(MicroBatch.of(rows, packed.tolist(), forest.select_rows(packed)))
    for bin_ in best_fit(forest.row_index.lengths[flat_rows].tolist(), max_flat_tokens) if flat_rows else []:
        batches.append(MicroBatch.of(rows, [flat_rows[index] for index in bin_], None))
    return batches if options.path_weighting == "verl" else _with_weights(batches, forest, rows, options)


def _beyond_budget(
    batch: MicroBatch, rows: Rows, max_tokens: int, options: TreeOptions, plans: PlanCache, chooser: Chooser | None
) -> MicroBatch:
    """A group beyond the budget, with the way in which it runs."""
    part, choice = batch.forest, None
    assert part is not None
    if chooser is not None:
        head_share = batch.head_tokens(rows) / part.num_unique
        # Rounded up to eighths, so that inference and update of a group usually share one cached plan.
        head_share = np.ceil(8 * head_share) / 8
        choose = partial(chooser.choose, part, max_tokens, head_share=head_share)
        choice = plans.recall(part, (max_tokens, chooser, head_share), choose)
    return replace(
        batch,
        plan=plans.plan(part, max_tokens) if choice is None else choice.plan,
        saving=MemorySaving(relays_on_host=options.offload is True) if choice is None else choice.saving,
        choice=choice,
    )


def _with_weights(batches: list[MicroBatch], forest: Forest, rows: Rows, options: TreeOptions) -> list[MicroBatch]:
    """The batches with path weights: those given with the rows, else weights computed over the whole call."""
    if options.path_weighting in ("sep_avg", "session"):
        if rows.weight_F is not None:
            # Equal within each row; a row without a loss has none and gets 1.
            weight_B = np.maximum.reduceat(rows.weight_F, rows.offsets[:-1])
            weight_B = np.where(weight_B > 0, weight_B, 1.0)
        elif options.path_weighting == "session":
            weight_B = session_weights(rows.group_B)
        else:
            weight_B = tree_mean_weights(forest)
        return [replace(batch, row_weight_B=weight_B[list(batch.rows)]) for batch in batches]
    weight_F = rows.weight_F
    if weight_F is None:
        if options.path_weighting == "custom":
            raise RowError("tree.path_weighting=custom: expected weights of the rows (Rows.weight_F), received none")
        trained = forest.row_index.with_values(np.append(False, rows.counted_F[:-1]))
        weight_F = once_per_token_weights(forest, trained).values
    weight_of_next_F = np.append(weight_F[1:], 0)
    return [replace(batch, edge_weight_F=weight_of_next_F[batch.flat_f]) for batch in batches]
