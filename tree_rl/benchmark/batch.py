"""Rows to update on, with groups, trained tokens and advantages: drawn agents of any overlap, or a recording.

Legend: B rows, L tokens of a row.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np

from tree_rl.inspection.files import InputError
from tree_rl.inspection.overlap_by_group import rows_by_group
from tree_rl.inspection.row import Row
from tree_rl.tree import Forest, Jagged, Overlap, measure_forest
from tree_rl.tree.report.counted import counted

TURN_TOKENS = 400
"""Tokens of an observation and the reply to it."""
JITTER = 0.8
"""Largest distance of a branching depth from the mean, as a share of the mean's distance to the nearer end of a row."""
GATE_TOKENS = 4096
"""Flat tokens, about, of the batch whose gradients are compared."""


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class Batch:
    """The rows of one optimizer step."""

    name: str
    """Where they come from."""
    rows: tuple[np.ndarray, ...]
    """B of int64 [L]."""
    trained: tuple[np.ndarray, ...]
    """B of bool [L], tokens with a loss; a row's first token has none."""
    groups: tuple[str, ...]
    """[B]; only rows of one group merge."""
    advantage_B: np.ndarray
    """float32 [B]."""

    @property
    def num_trained(self) -> int:
        """Row tokens with a loss: the normaliser of the loss."""
        return sum(int(trained.sum()) for trained in self.trained)

    def rows_of_groups(self) -> list[list[int]]:
        """Indices of the rows of each group, groups in order of first appearance."""
        return list(rows_by_group(self.groups).values())

    def forest(self) -> Forest:
        """The rows as trees."""
        return Forest.from_rows(self.rows, merge_key=self.groups)

    def overlap(self) -> Overlap:
        """What trees can save."""
        return measure_forest(self.forest(), trained=Jagged.from_rows(self.trained))

    def reversed(self) -> "Batch":
        """The same rows, last first."""
        turned = {name: getattr(self, name)[::-1] for name in ("rows", "trained", "groups")}
        return replace(self, **turned, advantage_B=self.advantage_B[::-1].copy())

    def apart(self) -> "Batch":
        """The same rows with their tokens shuffled, so that they hardly share a prefix."""
        draw = np.random.default_rng(0)
        return replace(self, rows=tuple(draw.permutation(row) for row in self.rows))

    def for_gate(self) -> "Batch":
        """A batch of about `GATE_TOKENS` with the same shape of tree: one of every few tokens of each row.

        It is trained if any of the few is, or rows with few trained tokens would lose them all. Rows so short that they
        do lose them stay whole.
        """
        every = max(1, sum(len(row) for row in self.rows) // GATE_TOKENS)
        kept = (np.logical_or.reduceat(trained, np.arange(0, len(trained), every)) for trained in self.trained)
        trained = tuple(map(_without_first, kept))
        thinned = replace(self, rows=tuple(row[::every] for row in self.rows), trained=trained)
        return thinned if thinned.num_trained else self


def check_por(por: float, num_rows: int) -> None:
    """Raise an InputError if rows of equal length, `num_rows` a group, cannot overlap that much."""
    if por and not 0 < por * num_rows < num_rows - 1:
        below = f"at least 0 and below {1 - 1 / num_rows:.3f}" if num_rows > 1 else "0"
        raise InputError(f"--por {por:g}: expected {below} with {counted(num_rows, 'row')} in a group")


def agent_batch(
    *, por: float, num_rows: int, row_tokens: int, num_groups: int, trained_share: float, vocab: int, seed: int = 0
) -> Batch:
    """Groups of rows of equal length; each row but the first leaves an earlier one at a random depth.

    Whatever the overlap (`check_por` limits it), there are as many rows and row tokens, as in the paper's figure. Ids
    are drawn below `vocab`.
    """
    check_por(por, num_rows)
    draw = np.random.default_rng(seed)
    depth = por * row_tokens * num_rows / max(num_rows - 1, 1)
    rows: list[np.ndarray] = []
    for _ in range(num_groups):
        group: list[np.ndarray] = []
        for shared in [0, *_depths(draw, depth, row_tokens, num_rows - 1)]:
            prefix = group[draw.integers(len(group))][:shared] if shared else np.empty(0, dtype=np.int64)
            group.append(np.concatenate([prefix, draw.integers(0, vocab, row_tokens - shared)]))
        rows += group
    turn = min(TURN_TOKENS, max(row_tokens // 8, 2))
    written = _without_first(np.arange(row_tokens) % turn >= turn * (1 - trained_share))
    return Batch(
        name="agents",
        rows=tuple(rows),
        trained=(written,) * len(rows),
        groups=tuple(f"group {index // num_rows}" for index in range(len(rows))),
        advantage_B=draw.standard_normal(len(rows)).astype(np.float32),
    )


def recorded_batches(
    rows: Sequence[Row], *, name: str, por: float, flat_tokens: int, max_tokens: int, count: int
) -> list[Batch]:
    """Whole groups of a recording, those whose overlap is nearest to `por` first, each in one batch only.

    The last group of a batch may exceed `flat_tokens`. Groups of more than `max_tokens` unique tokens are skipped;
    raises an InputError if all are.

    Returns:
        At least one batch; fewer than `count` where the recording ends, and then the last may be small.
    """
    candidates = []
    for members in rows_by_group(row.group for row in rows).values():
        forest = Forest.from_rows([rows[index].token_ids for index in members])
        if forest.num_unique <= max_tokens:
            candidates.append((abs(forest.por - por), members))
    if not candidates:
        raise InputError(f"{name}: expected a group of at most {max_tokens} unique tokens; raise --max-tokens")
    batches: list[list[Row]] = [[]]
    for _, members in sorted(candidates, key=lambda candidate: candidate[0]):
        if sum(len(row.token_ids) for row in batches[-1]) >= flat_tokens:
            batches.append([])
        batches[-1] += [rows[index] for index in members]
    return [recorded_batch(chosen, name=name, seed=seed) for seed, chosen in enumerate(batches[:count])]


def recorded_batch(rows: Sequence[Row], *, name: str, seed: int = 0) -> Batch:
    """One batch of recorded rows with drawn advantages; a row without a mask is trained everywhere."""
    everywhere = (np.ones(len(row.token_ids), dtype=bool) if row.trained is None else row.trained for row in rows)
    return Batch(
        name=name,
        rows=tuple(row.token_ids for row in rows),
        trained=tuple(_without_first(trained) for trained in everywhere),
        groups=tuple(row.group for row in rows),
        advantage_B=np.random.default_rng(seed).standard_normal(len(rows)).astype(np.float32),
    )


def _depths(draw: np.random.Generator, mean: float, limit: int, count: int) -> list[int]:
    """Branching depths that scatter around a mean and have exactly that mean, rounded."""
    if count == 0 or mean == 0:
        return [0] * count
    scatter = draw.uniform(-1, 1, count)
    scatter -= scatter.mean()
    scatter /= max(np.abs(scatter).max(), 1e-9)
    depths = mean + JITTER * min(mean, limit - mean) * scatter
    return np.clip(np.rint(depths), 0, limit - 1).astype(int).tolist()


def _without_first(trained: np.ndarray) -> np.ndarray:
    marks = trained.copy()
    marks[:1] = False
    return marks
