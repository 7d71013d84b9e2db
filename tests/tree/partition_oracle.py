"""The best cuts by dynamic programming over all ways to leave an item that a best plan may need: what tests compare to.

What the rest of the forest sees of an item is its cost, its load and its depth; the ways that are not better than
another in any of the three are dropped, and so are those that cost more than the heuristic plus a partition of its own.
Legend: I items, C capacity.
"""

from dataclasses import dataclass

from tree_rl.tree.partition.problem import KEPT, CutProblem, Cuts, measure_cuts, room_below, split_chain

WORK_LIMIT = 60_000
"""Steps before giving up, about a tenth of a second: forests where many unequal subtrees meet at one token."""


@dataclass(frozen=True, slots=True, eq=False)
class _Step:
    """One child's part in a plan: its own plan, and where it goes."""

    before: "_Step | None"
    child: int
    way: "_Plan"
    bin_load: int
    """KEPT, or the tokens that its partition has before it: 0 begins one."""


@dataclass(frozen=True, slots=True, eq=False)
class _Plan:
    """One plan of all that hangs from an item."""

    cost: int
    """Partitions closed below, weighted beyond any relay, plus the tokens that they relay."""
    load: int
    """Tokens that hang together with the item's first token."""
    levels: int
    """Partitions on the longest path downwards, the open one included."""
    last_step: _Step | None


_Open = dict[tuple[int, tuple[int, ...]], list[tuple[int, int, _Step | None]]]
"""By tokens kept and sorted loads of the partitions begun: (cost, levels, last step), none better in both."""


class _OutOfWorkError(Exception):
    """The work limit is reached."""


@dataclass(slots=True)
class _Search:
    """What every combination needs to know."""

    capacity: int
    partition_cost: int
    work_left: int

    def combine(self, room: int, cut_past: int, options: list[tuple[int, list[_Plan]]], most: int) -> _Open:
        """All ways, within a cost of ``most``, to keep or share what hangs from a token with so much room."""
        begin_cost = self.partition_cost + cut_past
        rest = [(min(way.cost for way in ways), min(way.load for way in ways)) for _, ways in options]
        rest_cost, rest_load = sum(cost for cost, _ in rest), sum(load for _, load in rest)
        states: _Open = {(0, ()): [(0, 1, None)]}
        for (child, ways), (least_cost, least_load) in zip(options, rest, strict=True):
            rest_cost, rest_load = rest_cost - least_cost, rest_load - least_load
            extended: _Open = {}
            for (kept, bins), paths in states.items():
                for cost, levels, last in paths:
                    for way in ways:
                        for load, shared, joined, begun in self._places(kept, bins, way.load, room):
                            total = cost + way.cost + begun * begin_cost
                            overflow = load + sum(shared) + rest_load - room - len(shared) * self.capacity
                            if total + rest_cost + begin_cost * max(0, -(-overflow // self.capacity)) > most:
                                continue
                            deep = max(levels, way.levels + (joined != KEPT))
                            _offer(extended.setdefault((load, shared), []), total, deep, last, child, way, joined)
            states = extended
        return states

    def _places(
        self, kept: int, bins: tuple[int, ...], load: int, room: int
    ) -> list[tuple[int, tuple[int, ...], int, int]]:
        """Where a load can go: tokens kept then, partitions then, the load of the one joined, how many are begun."""
        places = [(kept, tuple(sorted((*bins, load))), 0, 1)]
        if kept + load <= room:
            places.append((kept + load, bins, KEPT, 0))
        for place, filled in enumerate(bins):
            if filled + load <= self.capacity and (place == 0 or bins[place - 1] != filled):
                shared = tuple(sorted((*bins[:place], filled + load, *bins[place + 1 :])))
                places.append((kept, shared, filled, 0))
        self.work_left -= len(places)
        if self.work_left < 0:
            raise _OutOfWorkError
        return places


def exact_cuts(problem: CutProblem, start: Cuts, *, work_limit: int = WORK_LIMIT) -> Cuts | None:
    """The best cuts: fewest partitions, least relayed tokens, least depth.

    Args:
        problem: I items.
        start: the heuristic's choice, a bound on the cost.
        work_limit: steps before giving up.

    Returns:
        A best choice; None where the work limit is too small.
    """
    deepest = max((past + length for past, length in zip(problem.past, problem.length, strict=True)), default=0)
    partition_cost = (start.partitions + 2) * (deepest + 1)
    search = _Search(problem.capacity_tokens, partition_cost, work_limit)
    bounds, total = _start_costs(problem, start, partition_cost)
    ways: list[list[_Plan]] = [[] for _ in problem.length]
    try:
        for item in range(len(ways) - 1, -1, -1):
            ways[item] = _ways(problem, item, ways, bounds[item], search)
        closed = search.combine(0, 0, [(root, ways[root]) for root in problem.roots], total)
    except _OutOfWorkError:
        return None
    best = min((path for paths in closed.values() for path in paths), key=lambda path: path[:2])
    return measure_cuts(problem, _read(problem, best[2]))


def _ways(problem: CutProblem, item: int, ways: list[list[_Plan]], bound: int, search: _Search) -> list[_Plan]:
    past, length, capacity = problem.past[item], problem.length[item], problem.capacity_tokens
    options = [(child, ways[child]) for child in problem.children[item]]
    most = bound + search.partition_cost + past
    found = []
    for (kept, _), paths in search.combine(room_below(length, capacity), past + length, options, most).items():
        inner, top = split_chain(length, kept, capacity)
        chain = inner * (search.partition_cost + past + top) + capacity * (inner * (inner - 1) // 2)
        found += [
            _Plan(cost + chain, top, levels + inner, last) for cost, levels, last in paths if cost + chain <= most
        ]
    found.sort(key=lambda way: (way.cost, way.load, way.levels))
    best: list[_Plan] = []
    for way in found:
        search.work_left -= len(best)
        if not any(other.load <= way.load and other.levels <= way.levels for other in best):
            best.append(way)
    return best


def _offer(
    paths: list[tuple[int, int, _Step | None]],
    cost: int,
    levels: int,
    last: _Step | None,
    child: int,
    way: _Plan,
    joined: int,
) -> None:
    """Add a path unless one is as good in cost and levels; drop those that it beats."""
    if any(other_cost <= cost and other_levels <= levels for other_cost, other_levels, _ in paths):
        return
    paths[:] = [path for path in paths if path[0] < cost or path[1] < levels]
    paths.append((cost, levels, _Step(last, child, way, joined)))


def _start_costs(problem: CutProblem, start: Cuts, partition_cost: int) -> tuple[list[int], int]:
    """Cost of what the heuristic closes below each item's first token, and of its whole plan."""
    costs = [0] * len(problem.length)
    total = 0
    for item in range(len(costs) - 1, -1, -1):
        inner, past = start.inner[item], problem.past[item]
        costs[item] += inner * (partition_cost + past + start.top[item])
        costs[item] += problem.capacity_tokens * (inner * (inner - 1) // 2)
        upwards = costs[item] + (start.leader[item] == item) * (partition_cost + past)
        if problem.parent[item] >= 0:
            costs[problem.parent[item]] += upwards
        else:
            total += upwards
    return costs, total


def _read(problem: CutProblem, last: _Step | None) -> list[int]:
    """Leaders from the steps: of partitions with equal loads any is the one joined."""
    leader = [KEPT] * len(problem.length)
    waiting = [last]
    while waiting:
        step, steps = waiting.pop(), []
        while step is not None:
            steps.append(step)
            waiting.append(step.way.last_step)
            step = step.before
        begun: list[list[int]] = []
        for step in reversed(steps):
            if step.bin_load == KEPT:
                continue
            if step.bin_load == 0:
                begun.append([step.way.load, step.child])
            else:
                joined = next(content for content in begun if content[0] == step.bin_load)
                joined[0] += step.way.load
                joined.append(step.child)
        for _, *children in begun:
            for child in children:
                leader[child] = min(children)
    return leader
