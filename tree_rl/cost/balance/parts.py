"""Which paths of which groups every rank runs, and what it would cost to move some of them.

Legend: D ranks, n paths of one group on one rank, k candidates.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np

from tree_rl.cost.balance.paths import GroupPaths


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class Runs:
    """Candidates of one group on one rank: runs of paths, neighbours among those that lie there."""

    group: int
    """Number of the group."""
    paths: np.ndarray
    """int64 [n], the group's paths on the rank."""
    first_k: np.ndarray
    """int64 [k], index of each run's first path among them."""
    last_k: np.ndarray
    """int64 [k], index of its last path."""
    alone_k: np.ndarray
    """float64 [k], cost of the run on a rank without the group."""
    saved_k: np.ndarray
    """float64 [k], what its rank no longer computes when the run leaves."""

    def take(self, index: int) -> np.ndarray:
        """int64, paths of one run."""
        return self.paths[self.first_k[index] : self.last_k[index] + 1]

    def head(self, most: int) -> "Runs":
        """The first so many runs."""
        return replace(
            self,
            first_k=self.first_k[:most],
            last_k=self.last_k[:most],
            alone_k=self.alone_k[:most],
            saved_k=self.saved_k[:most],
        )


class Parts:
    """Paths on ranks; every path lies on exactly one."""

    def __init__(self, groups: Sequence[GroupPaths], num_ranks: int) -> None:
        """Place nothing yet."""
        self.groups = groups
        self.num_ranks = num_ranks
        self.load_D = np.zeros(num_ranks)
        """Cost of every rank."""
        self.on_rank: list[dict[int, np.ndarray]] = [{} for _ in range(num_ranks)]
        """Per rank its groups, each with its paths there, ascending."""
        self.ranks_of: list[set[int]] = [set() for _ in groups]
        """Per group the ranks that run some of it."""
        self._runs: dict[tuple[int, int], Runs] = {}

    def copy(self) -> "Parts":
        """The same placement, to be changed apart."""
        other = Parts(self.groups, self.num_ranks)
        other.load_D = self.load_D.copy()
        other.on_rank = [dict(held) for held in self.on_rank]
        other.ranks_of = [set(ranks) for ranks in self.ranks_of]
        other._runs = dict(self._runs)
        return other

    @property
    def slowest(self) -> int:
        """The rank of the highest cost."""
        return int(self.load_D.argmax())

    @property
    def highest(self) -> float:
        """Its cost."""
        return float(self.load_D.max())

    @property
    def num_split(self) -> int:
        """Groups on several ranks."""
        return sum(len(ranks) > 1 for ranks in self.ranks_of)

    def put(self, rank: int, group: int, paths: np.ndarray) -> None:
        """Place paths on a rank."""
        held = self.on_rank[rank].get(group)
        self._set(rank, group, paths if held is None else np.union1d(held, paths))

    def move(self, source: int, target: int, group: int, paths: np.ndarray) -> None:
        """Move paths from one rank to another."""
        self._set(source, group, np.setdiff1d(self.on_rank[source][group], paths))
        self.put(target, group, paths)

    def runs(self, rank: int, group: int) -> Runs:
        """All runs of a group's paths on a rank: the one of all of them, then by length."""
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
        """float64 [k], what each run adds to a rank's cost; inf where its paths and the rank's interleave."""
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
        self._runs.pop((rank, group), None)
        self.ranks_of[group].discard(rank)
        if len(paths):
            self.on_rank[rank][group] = paths
            self.ranks_of[group].add(rank)
        if held is not None or len(paths):
            # Summed anew each time, so that rounding does not depend on what was tried before.
            self.load_D[rank] = sum(self.groups[g].cost(self.on_rank[rank][g]) for g in sorted(self.on_rank[rank]))
