"""The paths that every rank runs, and the cost of moving some of them.

Legend: D ranks, n paths of one group on one rank, k runs of consecutive paths.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np

from tree_rl.cost.balance.paths import GroupPaths


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class Runs:
    """Candidates for a move: runs of consecutive paths of one group on one rank."""

    group: int
    """Number of the group."""
    paths: np.ndarray
    """int64 [n], the group's paths on the rank, ascending."""
    first_k: np.ndarray
    """int64 [k], index into `paths` of each run's first path."""
    last_k: np.ndarray
    """int64 [k], index into `paths` of each run's last path."""
    alone_k: np.ndarray
    """float64 [k], cost of the run on a rank without the group."""
    saved_k: np.ndarray
    """float64 [k], cost that the rank saves when the run leaves."""

    def take(self, index: int) -> np.ndarray:
        """int64, paths of the run."""
        return self.paths[self.first_k[index] : self.last_k[index] + 1]

    def head(self, most: int) -> "Runs":
        """The first `most` runs."""
        return replace(
            self,
            first_k=self.first_k[:most],
            last_k=self.last_k[:most],
            alone_k=self.alone_k[:most],
            saved_k=self.saved_k[:most],
        )


class Parts:
    """Placement of paths on ranks; every path is on at most one rank."""

    def __init__(self, groups: Sequence[GroupPaths], num_ranks: int) -> None:
        """Place nothing yet."""
        self.groups = groups
        self.num_ranks = num_ranks
        self.load_D = np.zeros(num_ranks)
        """float64 [D], cost of every rank."""
        self.on_rank: list[dict[int, np.ndarray]] = [{} for _ in range(num_ranks)]
        """For each rank, the paths of each of its groups, ascending."""
        self.ranks_of: list[set[int]] = [set() for _ in groups]
        """For each group, the ranks that run part of it."""
        self._costs: list[dict[int, float]] = [{} for _ in range(num_ranks)]
        """For each rank, the cost of each of its groups."""
        self._runs: dict[tuple[int, int], Runs] = {}

    def copy(self) -> "Parts":
        """An independent copy of the placement."""
        other = Parts(self.groups, self.num_ranks)
        other.load_D = self.load_D.copy()
        other.on_rank = [dict(held) for held in self.on_rank]
        other.ranks_of = [set(ranks) for ranks in self.ranks_of]
        other._costs = [dict(costs) for costs in self._costs]
        other._runs = dict(self._runs)
        return other

    @property
    def slowest(self) -> int:
        """The rank with the highest cost."""
        return int(self.load_D.argmax())

    @property
    def highest(self) -> float:
        """Cost of the slowest rank."""
        return float(self.load_D.max())

    def fill(self, rank: int, groups: Sequence[int]) -> None:
        """Place whole groups on an empty rank."""
        for group in sorted(groups):
            self.on_rank[rank][group] = np.arange(self.groups[group].num_paths)
            self._costs[rank][group] = self.groups[group].whole
            self.ranks_of[group].add(rank)
        self.load_D[rank] = sum(self._costs[rank].values())

    def put(self, rank: int, group: int, paths: np.ndarray) -> None:
        """Place paths on a rank."""
        held = self.on_rank[rank].get(group)
        self._set(rank, group, paths if held is None else np.union1d(held, paths))

    def move(self, source: int, target: int, group: int, paths: np.ndarray) -> None:
        """Move paths from one rank to another."""
        self._set(source, group, np.setdiff1d(self.on_rank[source][group], paths))
        self.put(target, group, paths)

    def runs(self, rank: int, group: int) -> Runs:
        """All runs of a group's paths on a rank: the run of all paths first, then by length."""
        if (rank, group) not in self._runs:
            self._runs[rank, group] = self._find_runs(rank, group)
        return self._runs[rank, group]

    def _find_runs(self, rank: int, group: int) -> Runs:
        one = self.groups[group]
        paths = self.on_rank[rank][group]
        size = len(paths)
        first, last = np.triu_indices(size)
        by_length = np.argsort((last - first + 1) % size, kind="stable")
        first, last = first[by_length], last[by_length]
        link = np.zeros(size + 1)
        link[1:-1] = one.shared_PP[paths[:-1], paths[1:]]
        alone = np.concatenate([[0.0], np.cumsum(one.alone_P[paths])])
        links = np.concatenate([[0.0], np.cumsum(link)])
        sum_k = alone[last + 1] - alone[first]
        has_both = (first > 0) & (last < size - 1)
        bridge_k = np.where(has_both, one.shared_PP[paths[first - 1], paths[(last + 1) % size]], 0.0)
        return Runs(
            group=group,
            paths=paths,
            first_k=first,
            last_k=last,
            alone_k=sum_k - (links[last + 1] - links[first + 1]),
            saved_k=sum_k - (links[last + 2] - links[first]) + bridge_k,
        )

    def joined(self, runs: Runs, rank: int) -> np.ndarray:
        """float64 [k], cost that each run adds to a rank; inf where its paths interleave with the rank's."""
        held = self.on_rank[rank].get(runs.group)
        if held is None:
            return runs.alone_k
        shared = self.groups[runs.group].shared_PP
        first, last = runs.paths[runs.first_k], runs.paths[runs.last_k]
        after = np.searchsorted(held, first)
        has_left, has_right = after > 0, after < len(held)
        left, right = held[after - 1], held[np.minimum(after, len(held) - 1)]
        link_left = np.where(has_left, shared[left, first], 0.0)
        link_right = np.where(has_right, shared[last, right], 0.0)
        bridge = np.where(has_left & has_right, shared[left, right], 0.0)
        added = runs.alone_k - link_left - link_right + bridge
        return np.where(after == np.searchsorted(held, last), added, np.inf)

    def _set(self, rank: int, group: int, paths: np.ndarray) -> None:
        held = self.on_rank[rank].pop(group, None)
        costs = self._costs[rank]
        costs.pop(group, None)
        self._runs.pop((rank, group), None)
        self.ranks_of[group].discard(rank)
        if len(paths):
            self.on_rank[rank][group] = paths
            costs[group] = self.groups[group].cost(paths)
            self.ranks_of[group].add(rank)
        if held is not None or len(paths):
            # A fresh sum instead of an update, so that rounding does not depend on earlier trials.
            self.load_D[rank] = sum(costs[one] for one in sorted(costs))
