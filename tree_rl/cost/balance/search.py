"""Local search that makes the slowest rank of a placement faster: moves, swaps and random kicks."""

from dataclasses import dataclass

import numpy as np

from tree_rl.cost.balance.parts import Parts, Runs

GOOD_ENOUGH = 0.01
"""Relative distance to the lower bound at which kicks stop."""
LEAST_STEP = 2e-4
"""Share of the lower bound that each move must save on the slowest rank."""
MOST_SWAPPED = 32
"""Most runs of each rank that a swap tries."""
KICKED_RUNS = 3
"""Number of random runs that a kick moves before the search goes on."""


class Search:
    """One search with a limited number of trials; a trial compares the runs of one rank with another rank."""

    def __init__(self, bound: float, trials: int, *, only_whole: bool) -> None:
        """Configure the search.

        Args:
            bound: lower bound on the slowest rank's cost.
            trials: most trials.
            only_whole: do not split groups further.
        """
        self._bound, self._step, self._only_whole = bound, LEAST_STEP * bound, only_whole
        self._random = np.random.default_rng(0)
        self._known: dict[int, _Swappable] = {}
        self.trials = trials
        """Trials that are left."""

    def improve(self, parts: Parts) -> Parts:
        """Move or swap in place while that makes the slowest rank faster."""
        while self.trials > 0 and parts.highest > self._bound + self._step:
            if not (self._move(parts) or self._swap(parts)):
                break
        return parts

    def kick(self, parts: Parts) -> Parts:
        """Until no trials are left: move some runs at random, improve, and keep the better placement."""
        while self.trials > 0 and parts.highest > self._bound * (1 + GOOD_ENOUGH):
            kicked = parts.copy()
            for _ in range(KICKED_RUNS):
                source = kicked.slowest if self._random.random() < 0.5 else int(self._random.integers(parts.num_ranks))
                target = int(self._random.integers(parts.num_ranks))
                held = sorted(kicked.on_rank[source])
                if source != target and held:
                    group = held[int(self._random.integers(len(held)))]
                    runs = kicked.runs(source, group)
                    paths = runs.take(int(self._random.integers(len(runs.saved_k))))
                    kicked.move(source, target, group, paths)
            # Counts as a trial even if `improve` made none, so the loop ends.
            self.trials -= 1
            parts = min(self.improve(kicked), parts, key=placement_cost)
        return parts

    def _move(self, parts: Parts) -> bool:
        """Move the run off the slowest rank for which the slower of source and target becomes fastest."""
        source = parts.slowest
        best, chosen = parts.highest - self._step, None
        for group in sorted(parts.on_rank[source]):
            runs = parts.runs(source, group)
            runs = runs.head(1) if self._only_whole else runs
            here = parts.load_D[source] - runs.saved_k
            for target in _targets(parts, source, group):
                self.trials -= 1
                slower = np.maximum(here, parts.load_D[target] + parts.joined(runs, target))
                index = int(slower.argmin())
                if slower[index] < best:
                    best, chosen = float(slower[index]), (target, group, runs.take(index))
        if chosen is None:
            return False
        parts.move(source, *chosen)
        return True

    def _swap(self, parts: Parts) -> bool:
        """Swap a run of the slowest rank for one of another group on another rank, by the same criterion."""
        source = parts.slowest
        mine = self._swappable(parts, source)
        others = [rank for rank in range(parts.num_ranks) if rank != source and parts.on_rank[rank]]
        if not others:
            return False
        self.trials -= 1
        sides = [self._swappable(parts, rank) for rank in others]
        rank_k = np.repeat(others, [len(side.saved_k) for side in sides])
        group_k = np.concatenate([side.group_k for side in sides])
        arrives = np.concatenate([side.joined(parts, source) for side in sides])
        leaves = np.concatenate([side.saved_k for side in sides])
        added = np.repeat(mine.alone_k[:, None], parts.num_ranks, axis=1)
        for rank in sorted({rank for runs in mine.runs for rank in parts.ranks_of[runs.group]} - {source}):
            added[:, rank] = mine.joined(parts, rank)
        here = parts.load_D[source] - mine.saved_k[:, None] + arrives
        there = (parts.load_D + added)[:, rank_k] - leaves
        slower = np.where(mine.group_k[:, None] == group_k, np.inf, np.maximum(here, there))
        row, column = divmod(int(slower.argmin()), slower.shape[1])
        if slower[row, column] >= parts.highest - self._step:
            return False
        target = int(rank_k[column])
        outgoing, incoming = mine.take(row), sides[others.index(target)].take(column - int(np.argmax(rank_k == target)))
        parts.move(source, target, *outgoing)
        parts.move(target, source, *incoming)
        return True

    def _swappable(self, parts: Parts, rank: int) -> "_Swappable":
        """The runs of a rank that a swap tries, cached until the rank changes."""
        held = tuple(parts.runs(rank, group) for group in sorted(parts.on_rank[rank]))
        known = self._known.get(rank)
        # Runs compare by identity: `Parts` makes new ones whenever a rank changes.
        if known is None or known.held != held:
            most = 1 if self._only_whole else max(1, MOST_SWAPPED // len(held))
            self._known[rank] = known = _Swappable.of(held, most)
        return known


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class _Swappable:
    """Runs of a rank that a swap tries: for each group all its paths together, then single paths, then longer runs."""

    held: tuple[Runs, ...]
    """All runs of the rank."""
    runs: tuple[Runs, ...]
    """Runs that are tried."""
    saved_k: np.ndarray
    alone_k: np.ndarray
    group_k: np.ndarray

    @classmethod
    def of(cls, held: tuple[Runs, ...], most: int) -> "_Swappable":
        """Try the first `most` runs of each group."""
        runs = tuple(one.head(most) for one in held)
        return cls(
            held=held,
            runs=runs,
            saved_k=np.concatenate([one.saved_k for one in runs]),
            alone_k=np.concatenate([one.alone_k for one in runs]),
            group_k=np.repeat([one.group for one in runs], [len(one.saved_k) for one in runs]),
        )

    def joined(self, parts: Parts, rank: int) -> np.ndarray:
        """float64 [k], see `Parts.joined`."""
        if not any(one.group in parts.on_rank[rank] for one in self.runs):
            return self.alone_k
        return np.concatenate([parts.joined(one, rank) for one in self.runs])

    def take(self, index: int) -> tuple[int, np.ndarray]:
        """Group and paths of a run."""
        for one in self.runs:
            if index < len(one.saved_k):
                return one.group, one.take(index)
            index -= len(one.saved_k)
        raise IndexError(index)


def placement_cost(parts: Parts) -> tuple[float, float]:
    """Cost of the slowest rank, then of all ranks."""
    return parts.highest, float(parts.load_D.sum())


def _targets(parts: Parts, source: int, group: int) -> list[int]:
    """Ranks that could take a run of the group: those that run part of it, and the least loaded of the others."""
    held = parts.ranks_of[group]
    load_D = parts.load_D.copy()
    load_D[list(held)] = np.inf
    return sorted({int(load_D.argmin()), *held} - {source})
