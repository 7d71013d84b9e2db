"""Plans how a forest beyond memory runs: in connected partitions of at most C unique tokens, each token once.

The aims in order: fewest partitions, least relayed context, shallowest tree of partitions
(paper, section Redundancy-Free Tree Partitioning).
"""

from importlib.util import find_spec
from typing import Literal

from tree_rl.extras import MissingExtraError
from tree_rl.tree.forest import Forest
from tree_rl.tree.partition.heuristic import greedy_cuts, least_depth, lower_bounds
from tree_rl.tree.partition.partitions import PartitionPlan, lay_out_partitions
from tree_rl.tree.partition.problem import Cuts, reduce_forest

MODEL_ITEMS = 400
"""Most items for which ``auto`` runs the solver."""
MODEL_PAIRS = 4_000
"""Most pairs of siblings for which ``auto`` runs the solver."""


def plan_partitions(
    forest: Forest,
    max_tokens: int,
    *,
    time_limit_s: float = 0.2,
    solver: Literal["auto", "heuristic", "cp_sat"] = "auto",
) -> PartitionPlan:
    """Cut a forest into partitions, at segment ends and inside segments longer than ``max_tokens``.

    All subtrees of a partition hang from one cut token or are whole trees, so small trees can share a forward. Equal
    inputs give equal plans, except if the time limit stops the solver.

    Args:
        forest: N unique tokens.
        max_tokens: C, most unique tokens of a partition.
        time_limit_s: time limit of the solver in seconds.
        solver: ``heuristic`` runs in linear time. ``cp_sat`` improves its plan until it is proven best or time is up,
            and needs OR-Tools. ``auto`` does so if OR-Tools is installed, the heuristic's plan is not proven best and
            the forest has few places to cut.

    Raises:
        ValueError: budget below 1, negative time limit or unknown solver.
        MissingExtraError: ``cp_sat`` without OR-Tools.
    """
    if max_tokens < 1:
        raise ValueError(f"max_tokens: expected at least 1 unique token, received {max_tokens}")
    if not time_limit_s >= 0:
        raise ValueError(f"time_limit_s: expected 0 seconds or more, received {time_limit_s}")
    if solver not in ("auto", "heuristic", "cp_sat"):
        raise ValueError(f"solver: expected auto, heuristic or cp_sat, received {solver!r}")
    has_solver = find_spec("ortools") is not None
    if solver == "cp_sat" and not has_solver:
        raise MissingExtraError("solver='cp_sat'", "ortools")
    problem = reduce_forest(forest, max_tokens)
    cuts, is_certain = greedy_cuts(problem)
    bounds = (cuts.partitions, cuts.relayed_tokens) if is_certain else lower_bounds(problem)
    is_optimal = cuts.score == (*bounds, least_depth(problem, cuts.relayed_tokens))
    is_small = len(problem.length) <= MODEL_ITEMS and problem.num_pairs <= MODEL_PAIRS
    chosen: Cuts = cuts
    if not is_optimal and (solver == "cp_sat" or (solver == "auto" and is_small and has_solver)):
        from tree_rl.tree.partition.solver import improve_cuts

        chosen, is_optimal = improve_cuts(problem, cuts, bounds, time_limit_s=time_limit_s)
    return lay_out_partitions(
        forest,
        problem,
        chosen,
        lower_bound=chosen.partitions if is_optimal else bounds[0],
        solver="heuristic" if chosen is cuts else "cp_sat",
        is_optimal=is_optimal,
    )
