"""Rows that run together, in one forward and backward or in partitions of a forest: planning's output for running."""

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np

from tree_rl.cost.memory.choice import MemoryChoice
from tree_rl.cost.memory.model import MemoryModel, MemorySaving, Peak
from tree_rl.cost.memory.partition_peak import PartitionedPeak
from tree_rl.training.row_images import ForestImages
from tree_rl.training.rows import Rows
from tree_rl.tree.forest import Forest
from tree_rl.tree.forest.jagged import offsets_of, positions_of_rows
from tree_rl.tree.partition import PartitionPlan


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class MicroBatch:
    """Rows that run together."""

    rows: tuple[int, ...]
    """Indices of its b rows in the call."""
    flat_f: np.ndarray
    """int64 [f], positions of its tokens among those of the call, row after row."""
    offsets: np.ndarray
    """int64 [b + 1], row boundaries in its outputs."""
    forest: Forest | None
    """Forest of the rows; None runs them without a tree."""
    row_weight_B: np.ndarray | None = None
    """float64 per row, its weight by `path_weighting: sep_avg` or `session`; None: equal weights."""
    edge_weight_F: np.ndarray | None = None
    """float64 per flat position, weight of the edge that starts there, by `path_weighting: token_unique`, `custom`."""
    plan: PartitionPlan | None = None
    """Partitions of a forest beyond the budget; None runs it in one forward."""
    saving: MemorySaving = field(default_factory=MemorySaving)
    """Measures that reduce the forest's GPU memory."""
    choice: MemoryChoice | None = None
    """How a forest beyond the budget runs, with its predicted peak; None within it, or without a memory model."""
    images: ForestImages | None = None
    """Images of the forest; None without any."""

    @classmethod
    def of(cls, rows: Rows, members: Sequence[int], forest: Forest | None) -> "MicroBatch":
        """Some rows of a call, by their indices, with their images."""
        picked = list(members)
        flat_f, offsets = positions_of_rows(rows.offsets, picked), offsets_of(np.diff(rows.offsets)[picked])
        images = None if rows.images is None or forest is None else rows.images.of_forest(forest, flat_f)
        return cls(rows=tuple(picked), flat_f=flat_f, offsets=offsets, forest=forest, images=images)

    @property
    def flat_tokens(self) -> int:
        """Tokens of all rows."""
        return len(self.flat_f)

    @property
    def unique_tokens(self) -> int:
        """Tokens that run: those of the forest, or `flat_tokens` without a tree."""
        return self.flat_tokens if self.forest is None else self.forest.num_unique

    def head_tokens(self, rows: Rows) -> int:
        """Tokens that meet the vocabulary: those at which a wanted edge starts, or all without a tree."""
        if self.forest is None:
            return self.flat_tokens
        wanted = self.forest.row_index.with_values(rows.wanted_F[self.flat_f])
        return int(np.count_nonzero(self.forest.rows_that_mark(wanted)))

    @property
    def num_partitions(self) -> int:
        """Number of forwards."""
        return 1 if self.plan is None else self.plan.num_partitions


def live_tokens(batches: Sequence[MicroBatch]) -> int:
    """Most unique tokens whose graphs are alive at the same time; 0 without micro-batches."""
    sizes = [batch.unique_tokens if batch.plan is None else batch.plan.peak_live_tokens for batch in batches]
    return max(sizes, default=0)


def predicted_peak(batches: Sequence[MicroBatch], model: MemoryModel) -> Peak:
    """Largest predicted peaks of the micro-batches, on the device and on the host; 0 without any."""
    peaks = [
        model.whole(batch.unique_tokens, saving=batch.saving)
        if batch.plan is None
        else PartitionedPeak(model, batch.plan).under(batch.saving)
        for batch in batches
    ]
    return Peak(
        device=max((peak.device for peak in peaks), default=0.0), host=max((peak.host for peak in peaks), default=0.0)
    )


def largest_forward(batches: Sequence[MicroBatch]) -> int:
    """Most tokens of one forward; 0 without micro-batches."""
    sizes = [
        batch.unique_tokens if batch.plan is None else max(len(part.tokens) for part in batch.plan.partitions)
        for batch in batches
    ]
    return max(sizes, default=0)
