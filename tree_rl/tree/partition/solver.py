"""The exact plan: CP-SAT over the I items, warm-started from the heuristic's plan, so never worse than it.

The aims are minimised one after the other: partitions, relayed tokens, depth. One worker, a fixed seed and a limit in
deterministic time make plans reproducible; the wall clock only stops runs on slow machines.
"""

import time
from dataclasses import dataclass
from typing import TypeAlias

from ortools.sat.python import cp_model

from tree_rl.tree.partition.heuristic import least_depth
from tree_rl.tree.partition.problem import KEPT, CutProblem, Cuts, measure_cuts, room_below

Amount: TypeAlias = cp_model.LinearExpr | int

DETERMINISTIC_SHARE = 0.3
"""CP-SAT's deterministic time units per second of the limit; an idle core of 2025 spends 0.6 per second."""


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class _Model:
    """Variables of one problem."""

    cp: cp_model.CpModel
    keep: list[cp_model.IntVar]
    """[I], 1 if the item stays in its parent's partition."""
    join: list[dict[int, cp_model.IntVar]]
    """[I], for each possible first item of its new partition (itself or an earlier sibling), 1 if the item joins it."""
    aims: tuple[Amount, Amount, Amount]
    """Partitions, relayed tokens, depth."""


def improve_cuts(
    problem: CutProblem, start: Cuts, bounds: tuple[int, int], *, time_limit_s: float
) -> tuple[Cuts, bool]:
    """Improve the cuts ``start`` until they are proven best or ``time_limit_s`` seconds are up.

    ``bounds`` are proven lower bounds on partitions and relayed tokens.

    Returns:
        The best cuts found (``start`` itself if nothing is better), and whether they are proven best.
    """
    deadline = time.monotonic() + time_limit_s
    model = _build(problem)
    best, proven, deterministic_left = start, True, DETERMINISTIC_SHARE * time_limit_s
    for aim, expression in enumerate(model.aims):
        least = (*bounds, least_depth(problem, best.relayed_tokens))[aim]
        is_met = best.score[aim] <= least
        left_s = deadline - time.monotonic()
        if not is_met and min(left_s, deterministic_left) > 0:
            model.cp.add(expression >= least)
            model.cp.minimize(expression)
            _hint(model, best)
            solver, status = _solve(model.cp, left_s, deterministic_left)
            deterministic_left -= solver.response_proto.deterministic_time
            if status in (cp_model.OPTIMAL, cp_model.FEASIBLE):
                found = measure_cuts(problem, _read(model, solver))
                best = found if found.score < best.score else best
            is_met = status == cp_model.OPTIMAL
        proven &= is_met
        model.cp.add(expression <= best.score[aim])
    return best, proven


def _solve(
    cp: cp_model.CpModel, limit_s: float, deterministic_limit: float
) -> tuple[cp_model.CpSolver, cp_model.CpSolverStatus]:
    solver = cp_model.CpSolver()
    solver.parameters.num_workers = 1
    solver.parameters.random_seed = 0
    solver.parameters.max_time_in_seconds = limit_s
    solver.parameters.max_deterministic_time = deterministic_limit
    return solver, solver.solve(cp)


def _build(problem: CutProblem) -> _Model:
    cp, items, capacity = cp_model.CpModel(), range(len(problem.length)), problem.capacity_tokens
    keep = [cp.new_bool_var(f"keep{item}") for item in items]
    join: list[dict[int, cp_model.IntVar]] = [{} for _ in items]
    top: list[Amount] = [0 for _ in items]
    inner: list[Amount] = [0 for _ in items]
    relayed: list[Amount] = []
    for item in reversed(items):
        length = problem.length[item]
        kept = [_load_if(cp, keep[child], top[child], capacity) for child in problem.children[item]]
        below: Amount = cp_model.LinearExpr.sum(kept) if kept else 0
        if kept:
            cp.add(below <= room_below(length, capacity))
        top[item], inner[item], relays = _chain(cp, length, problem.past[item], below, capacity)
        relayed.append(relays)
    for siblings in (*problem.children, problem.roots):
        _share(cp, siblings, keep, join, top, capacity)
    for root in problem.roots:
        cp.add(keep[root] == 0)
    partitions = sum(join[item][item] + inner[item] for item in items)
    relayed += [problem.past[item] * join[item][item] for item in items]
    return _Model(cp=cp, keep=keep, join=join, aims=(partitions, sum(relayed), _depth(cp, problem, keep, inner)))


def _load_if(cp: cp_model.CpModel, chosen: cp_model.IntVar, load: Amount, capacity: int) -> Amount:
    """``load`` if chosen, else 0."""
    if isinstance(load, int):
        return load * chosen
    product = cp.new_int_var(0, capacity, "")
    cp.add(product == load).only_enforce_if(chosen)
    cp.add(product == 0).only_enforce_if(~chosen)
    return product


def _chain(cp: cp_model.CpModel, length: int, past: int, below: Amount, capacity: int) -> tuple[Amount, Amount, Amount]:
    """``split_chain`` as constraints: top, inner cuts, relayed tokens. Only two numbers of cuts are possible."""
    total = length + below
    if isinstance(below, int) and total <= capacity:
        return total, 0, 0
    top = cp.new_int_var(1, capacity, "")
    if length <= capacity:
        cp.add(top == total)
        return top, 0, 0
    fewest = (length - 1) // capacity
    one_more = cp.new_bool_var("")
    cp.add(top == total - capacity * fewest - capacity * one_more)
    relayed = fewest * (past + top) + capacity * (fewest * (fewest - 1) // 2)
    relayed += (past + capacity * fewest) * one_more + _load_if(cp, one_more, top, capacity)
    return top, fewest + one_more, relayed


def _share(
    cp: cp_model.CpModel,
    siblings: list[int],
    keep: list[cp_model.IntVar],
    join: list[dict[int, cp_model.IntVar]],
    top: list[Amount],
    capacity: int,
) -> None:
    """Constrain each sibling to stay or to join one new partition, which is identified by its first item."""
    for place, item in enumerate(siblings):
        join[item] = {first: cp.new_bool_var(f"join{item},{first}") for first in siblings[: place + 1]}
        cp.add_exactly_one([keep[item], *join[item].values()])
    for place, first in enumerate(siblings):
        others = siblings[place + 1 :]
        for item in others:
            cp.add_implication(join[item][first], join[first][first])
        loads = [_load_if(cp, join[item][first], top[item], capacity) for item in others]
        if loads:
            cp.add(cp_model.LinearExpr.sum([top[first], *loads]) <= capacity)


def _depth(cp: cp_model.CpModel, problem: CutProblem, keep: list[cp_model.IntVar], inner: list[Amount]) -> Amount:
    deepest = cp.new_int_var(0, problem.start[-1], "depth")
    level: list[Amount] = []
    for item, above in enumerate(problem.parent):
        level.append((level[above] if above >= 0 else 0) + 1 - keep[item] + inner[item])
        if problem.children[item]:
            bottom = cp.new_int_var(0, problem.start[-1], "")
            cp.add(bottom == level[item])
            level[item] = bottom
        else:
            cp.add(deepest >= level[item])
    return deepest


def _hint(model: _Model, cuts: Cuts) -> None:
    model.cp.clear_hints()
    for item, first in enumerate(cuts.leader):
        model.cp.add_hint(model.keep[item], first == KEPT)
        for other, variable in model.join[item].items():
            model.cp.add_hint(variable, first == other)


def _read(model: _Model, solver: cp_model.CpSolver) -> list[int]:
    leader = []
    for item, kept in enumerate(model.keep):
        firsts = [first for first, variable in model.join[item].items() if solver.boolean_value(variable)]
        leader.append(KEPT if solver.boolean_value(kept) else firsts[0])
    return leader
