"""From rows to micro-batches: forests packed by unique tokens, groups whole, flat where a tree would not pay."""

from dataclasses import dataclass, field, replace
from functools import partial

import numpy as np

from tree_rl.cost.cost_model import CostModel
from tree_rl.cost.memory.choice import Chooser, MemoryChoice
from tree_rl.cost.memory.measures import MemoryMeasures
from tree_rl.cost.memory.model import MemoryModel, Peak
from tree_rl.cost.memory.partition_peak import PartitionedPeak
from tree_rl.training.options import TreeOptions
from tree_rl.training.planning.budget import Budget
from tree_rl.training.planning.plan_memory import PlanMemory
from tree_rl.training.rows import Rows
from tree_rl.tree.bins import best_fit
from tree_rl.tree.forest import Forest
from tree_rl.tree.forest.jagged import Jagged, offsets_of
from tree_rl.tree.packing import pack_groups
from tree_rl.tree.partition import PartitionPlan
from tree_rl.tree.weights import once_per_token_weights, tree_mean_weights


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class MicroBatch:
    """Rows that run in one forward and backward."""

    rows: tuple[int, ...]
    """Row indices of the call."""
    offsets: np.ndarray
    """int64 [b + 1], where each of its b rows lies in its outputs."""
    forest: Forest | None
    """Their forest, or None to run them without a tree."""
    row_weight_B: np.ndarray | None = None
    """float64 per row, 1 / K of its tree over the whole call, for `path_weighting: sep_avg`; None weighs all alike."""
    edge_weight_F: np.ndarray | None = None
    """float64 per flat position, of the edge that starts there, for `path_weighting: token_unique`."""
    flat_tokens: int = 0
    """Tokens that the rows contain."""
    unique_tokens: int = 0
    """Tokens that run: the forest's, or all of the rows' when they run flat."""
    plan: PartitionPlan | None = None
    """How a forest beyond the budget runs, partition by partition; None runs it in one forward."""
    measures: MemoryMeasures = field(default_factory=MemoryMeasures)
    """What its forest does to need less GPU memory."""
    choice: MemoryChoice | None = None
    """What was chosen for a forest beyond the budget, with its predicted peak; None within it, or without a model of
    memory."""

    @property
    def num_partitions(self) -> int:
        """Forwards."""
        return 1 if self.plan is None else self.plan.num_partitions


def plan_micro_batches(
    rows: Rows,
    config: TreeOptions,
    budget: Budget,
    cost: CostModel | None,
    plans: PlanMemory,
    chooser: Chooser | None = None,
) -> list[MicroBatch]:
    """Cut the rows of a call into micro-batches.

    Args:
        rows: all rows of this rank; none give no micro-batch.
        config: the tree options.
        budget: most tokens of a micro-batch.
        cost: of the model, with which `mode: auto` compares; None runs every group as a tree.
        plans: partition plans of earlier calls.
        chooser: chooses how a forest beyond the budget runs; None: in partitions of the budget's size.

    Returns:
        Forests beyond the budget first, then whole forests, then flat micro-batches; every row in exactly one.
    """
    if rows.num_rows == 0:
        return []
    by_uid = config.scope == "uid"
    forest = Forest.from_rows(
        [rows.token_ids(row) for row in range(rows.num_rows)], merge_key=rows.merge_keys(by_group=by_uid)
    )
    group_B = rows.group_B if by_uid else forest.tree_of_row
    groups = [np.flatnonzero(group_B == group) for group in np.unique(group_B)]
    # Rows that run without a tree leave no trace of their routers.
    always = config.mode == "tree" or config.router_aux_loss_coef is not None
    wanted = forest.row_index.with_values(rows.wanted_F)
    whole_groups, large, flat_rows = [], [], []
    for group in groups:
        part = forest.select_rows(group)
        if not (always or cost is None or cost.tree_pays(part, wanted.select(group))):
            flat_rows += group.tolist()
        elif part.num_unique <= budget.unique_tokens:
            whole_groups.append(group)
        else:
            large.append(_large_batch(part, group, wanted.select(group), budget.unique_tokens, config, plans, chooser))
    packed = pack_groups(forest, whole_groups, max_tokens=budget.unique_tokens)
    forests = [_micro_batch(forest, batch.rows, as_forest=True) for batch in packed]
    flats = [_micro_batch(forest, np.array(rows_), as_forest=False) for rows_ in _flat_bins(forest, flat_rows, budget)]
    return _with_weights(large + forests + flats, forest, rows, config)


def live_tokens(batches: list[MicroBatch]) -> int:
    """Most unique tokens whose graphs are alive at a time; 0 without micro-batches."""
    sizes = [batch.unique_tokens if batch.plan is None else batch.plan.peak_live_tokens for batch in batches]
    return max(sizes, default=0)


def predicted_peak(batches: list[MicroBatch], model: MemoryModel) -> Peak:
    """Largest predicted peaks of micro-batches, on the device and on the host; 0 without any."""
    peaks = [
        model.whole(batch.unique_tokens, measures=batch.measures)
        if batch.plan is None
        else PartitionedPeak(model, batch.plan).under(batch.measures)
        for batch in batches
    ]
    return Peak(
        device=max((peak.device for peak in peaks), default=0.0), host=max((peak.host for peak in peaks), default=0.0)
    )


def largest_forward(batches: list[MicroBatch]) -> int:
    """Most tokens of one forward; 0 without micro-batches."""
    sizes = [
        batch.unique_tokens if batch.plan is None else max(len(part.tokens) for part in batch.plan.partitions)
        for batch in batches
    ]
    return max(sizes, default=0)


def _large_batch(
    part: Forest,
    group: np.ndarray,
    wanted: Jagged,
    max_tokens: int,
    config: TreeOptions,
    plans: PlanMemory,
    chooser: Chooser | None,
) -> MicroBatch:
    """A group beyond the budget."""
    choice = None
    if chooser is not None:
        head_share = np.count_nonzero(part.rows_that_mark(wanted)) / part.num_unique
        # In eighths, so that inference and update of a group agree on its plan.
        head_share = np.ceil(8 * head_share) / 8
        choose = partial(chooser.choose, part, chooser.budget(max_tokens), head_share=head_share)
        choice = plans.choice(part, (max_tokens, chooser, head_share), choose)
    return MicroBatch(
        rows=tuple(group.tolist()),
        offsets=part.row_index.offsets,
        forest=part,
        plan=plans.plan(part, max_tokens) if choice is None else choice.plan,
        flat_tokens=part.num_flat,
        unique_tokens=part.num_unique,
        measures=MemoryMeasures(relays_on_host=config.offload is True) if choice is None else choice.measures,
        choice=choice,
    )


def _micro_batch(forest: Forest, members: np.ndarray, *, as_forest: bool) -> MicroBatch:
    part = forest.select_rows(members) if as_forest else None
    lengths = forest.row_index.lengths[members]
    flat_tokens = int(lengths.sum())
    return MicroBatch(
        rows=tuple(members.tolist()),
        offsets=offsets_of(lengths),
        forest=part,
        flat_tokens=flat_tokens,
        unique_tokens=flat_tokens if part is None else part.num_unique,
    )


def _with_weights(batches: list[MicroBatch], forest: Forest, rows: Rows, config: TreeOptions) -> list[MicroBatch]:
    """The batches, each with its share of the path weights: those that came with the rows, else of the whole call."""
    if config.path_weighting == "sep_avg":
        weight_B = tree_mean_weights(forest) if rows.weight_F is None else _weight_of_rows(rows.weight_F, forest)
        return [replace(batch, row_weight_B=weight_B[list(batch.rows)]) for batch in batches]
    if config.path_weighting == "token_unique":
        weight_of_next_F = np.append(
            (_weight_of_tokens(forest, rows) if rows.weight_F is None else rows.weight_F)[1:], 0
        )
        flat_of = [rows.flat_positions(list(batch.rows)) for batch in batches]
        pairs = zip(batches, flat_of, strict=True)
        return [replace(batch, edge_weight_F=weight_of_next_F[flat]) for batch, flat in pairs]
    return batches


def _weight_of_rows(weight_F: np.ndarray, forest: Forest) -> np.ndarray:
    """float64 [B] from weights that are equal in each row; a row without any weighs 1, and has no loss."""
    weight_B = np.maximum.reduceat(weight_F, forest.row_index.offsets[:-1])
    return np.where(weight_B > 0, weight_B, 1.0)


def _weight_of_tokens(forest: Forest, rows: Rows) -> np.ndarray:
    trained_F = np.zeros(forest.num_flat, dtype=bool)
    trained_F[1:] = rows.counted_F[:-1]
    return once_per_token_weights(forest, forest.row_index.with_values(trained_F)).values


def _flat_bins(forest: Forest, members: list[int], budget: Budget) -> list[list[int]]:
    """Rows in few bins of at most `budget.flat_tokens`."""
    bins = best_fit(forest.row_index.lengths[members].tolist(), budget.flat_tokens)
    return [[members[index] for index in content] for content in bins]
