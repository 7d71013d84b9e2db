"""What each rank trains: trees of one GPU's work, copied for every rank and dealt among them.

Legend: B rows, D ranks with rows of their own, C mini-batches.
"""

from dataclasses import dataclass, replace

import numpy as np

from tree_rl.benchmark.batch import Batch, agent_batch, recorded_batch
from tree_rl.cost import ModelShape
from tree_rl.cost.balance.batch import lay_out_groups, paths_of_groups
from tree_rl.cost.balance.paths import GroupPaths
from tree_rl.inspection.overlap_by_group import rows_by_group
from tree_rl.inspection.row import Row
from tree_rl.tree import Forest
from tree_rl.tree.forest.jagged import Jagged
from tree_rl.tree.packing import least_loaded

EQUAL, BALANCED, WHOLE_GROUPS = ARMS = ("equal", "balanced", "whole_groups")
"""A copy for each rank; dealt as by the trainer, which may split groups; whole groups, costliest first."""
RECORDED = "recorded"
POR, TRAINED, ROWS = 0.5, 0.3, 8
"""Shape of the synthetic GRPO trees: overlap, trained share, rows of a prompt."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Share:
    """What one rank trains."""

    cells: tuple[Batch, ...]
    """Its rows of each mini-batch."""
    unique_tokens: int
    imbalance: float
    """Work of the busiest ranks of all mini-batches over that of whole groups spread perfectly."""
    operations: float
    """Operations of its forward and backward, by the cost model."""


def drawn_trees(tokens: int, row_tokens: int, vocab: int) -> Batch:
    """GRPO trees of about `tokens` unique tokens in all; the rows of one tree are shorter where it would have more."""
    row_tokens = min(row_tokens, round(tokens / (ROWS * (1 - POR))))
    prompts = max(1, round(tokens / (ROWS * row_tokens * (1 - POR))))
    return agent_batch(
        por=POR, num_rows=ROWS, row_tokens=row_tokens, num_groups=prompts, trained_share=TRAINED, vocab=vocab
    )


def recorded_trees(rows: list[Row], tokens: int, vocab: int) -> Batch:
    """Whole trees of a recording in random order, of at most `tokens` unique tokens in all."""
    groups = list(rows_by_group(row.group for row in rows).values())
    chosen: list[int] = []
    left = tokens
    for index in np.random.default_rng(0).permutation(len(groups)):
        size = Forest.from_rows([rows[row].token_ids for row in groups[index]]).num_unique
        if size <= left:
            left -= size
            chosen += groups[index]
    if not chosen or any(rows[row].trained is None for row in chosen):
        raise SystemExit(f"--data: expected rows with a mask and a tree of at most {tokens} tokens; raise --tokens")
    batch = recorded_batch([rows[row] for row in chosen], name=RECORDED)
    return replace(batch, rows=tuple(row % vocab for row in batch.rows))


def share_of(one: Batch, arm: str, *, rank: int, world: int, shape: ModelShape, mini_batches: int = 1) -> Share:
    """This rank's rows of `world` copies of the trees, each with other token ids.

    Raises:
        SystemExit: a rank would have nothing to train in a mini-batch.
    """
    rows = [(row + 1009 * copy) % shape.vocab for copy in range(world) for row in one.rows]
    names = [f"{copy} {group}" for copy in range(world) for group in one.groups]
    known = list(dict.fromkeys(names))
    # Copies of a tree shall not fill a mini-batch of their own.
    places = np.arange(len(known)) if arm == EQUAL else np.random.default_rng(1).permutation(len(known))
    number = dict(zip(known, places, strict=True))
    group_of_row = np.array([number[name] for name in names])
    paths = paths_of_groups(group_of_row, rows, shape.cost)
    rows_DC = deal(arm, group_of_row, paths, world, mini_batches)
    if any(not len(content) for cells in rows_DC for content in cells):
        raise SystemExit(
            f"--mini-batches {mini_batches}: {len(known)} trees leave one of {world} ranks without rows in arm {arm}; "
            "raise --tokens"
        )
    load_DC = [
        [
            shape.cost.forest(Forest.from_rows([rows[i] for i in content], merge_key=group_of_row[content].tolist()))
            for content in cells
        ]
        for cells in rows_DC
    ]
    mean = sum(path.whole for path in paths) / world
    size = len(one.rows)
    cells = tuple(
        Batch(
            name=one.name,
            rows=tuple(rows[index] for index in content),
            trained=tuple(one.trained[index % size] for index in content),
            groups=tuple(names[index] for index in content),
            advantage_B=one.advantage_B[content % size],
        )
        for content in rows_DC[rank]
    )
    forests = [cell.forest() for cell in cells]
    return Share(
        cells=cells,
        unique_tokens=sum(forest.num_unique for forest in forests),
        imbalance=float(np.array(load_DC).max(axis=0).sum() / mean),
        operations=sum(
            shape.cost.forest(forest, Jagged.from_rows(cell.trained))
            for forest, cell in zip(forests, cells, strict=True)
        ),
    )


def deal(
    arm: str, group_of_row: np.ndarray, paths: list[GroupPaths], world: int, mini_batches: int
) -> list[list[np.ndarray]]:
    """int64 indices of the rows of each of D ranks in each of C mini-batches."""
    groups = np.arange(len(paths))
    if arm == BALANCED:
        layout = lay_out_groups(group_of_row, paths, num_ranks=world, num_cells=mini_batches)
        slots_DCR = layout.order.reshape(world, mini_batches, -1)
        return [[slots[slots < layout.num_rows] for slots in cells] for cells in slots_DCR]
    if arm == WHOLE_GROUPS:
        cost = np.array([path.whole for path in paths])
        cut = np.split(groups, np.arange(1, mini_batches) * len(paths) // mini_batches)
        bins_CD = [[content[part] for part in least_loaded(cost[content], world)] for content in cut]
        groups_DC = [list(cells) for cells in zip(*bins_CD, strict=True)]
    else:
        groups_DC = [np.array_split(content, mini_batches) for content in np.array_split(groups, world)]
    return [[np.flatnonzero(np.isin(group_of_row, content)) for content in cells] for cells in groups_DC]
