"""Plan how a forest beyond memory runs: connected partitions of at most C unique tokens, nothing computed twice.

Fewest partitions, then least relayed context, then the shallowest tree of partitions
(paper, section Redundancy-Free Tree Partitioning).
"""

from typing import Literal

from tree_rl.tree.forest import Forest
from tree_rl.tree.partition.exact import exact_cuts
from tree_rl.tree.partition.heuristic import fewest_partitions, greedy_cuts, least_depth, least_relayed
from tree_rl.tree.partition.layout import lay_out_partitions
from tree_rl.tree.partition.plan import Cut, Op, Partition, PartitionPlan, SolverName
from tree_rl.tree.partition.problem import CutProblem, Cuts, reduce_forest

__all__ = ["Cut", "Op", "Partition", "PartitionPlan", "plan_partitions"]

MODEL_ITEMS = 400
"""Most items for which ``auto`` asks the solver."""
MODEL_PAIRS = 4_000
"""Most pairs of siblings for which ``auto`` asks the solver."""


def plan_partitions(
    forest: Forest,
    max_tokens: int,
    *,
    time_limit_s: float = 0.5,
    solver: Literal["auto", "heuristic", "cp_sat"] = "auto",
) -> PartitionPlan:
    """Cut a forest into partitions.

    A partition holds subtrees, with what is cut off below them, that hang from one token or are roots; small trees
    thus share a forward. Cuts are at segment ends, and inside segments longer than ``max_tokens``.

    Args:
        forest: N unique tokens.
        max_tokens: C, most unique tokens of a partition.
        time_limit_s: most seconds for the solver.
        solver: ``heuristic`` runs in linear time; ``cp_sat`` improves on it until proven best or out of time, which
            needs OR-Tools; ``auto`` stops where the heuristic's plan is at a bound, else searches exactly within a
            fixed amount of work, and asks the solver only where that ends and the forest has few places to cut.

    Returns:
        The plan; equal inputs give equal plans unless the solver is stopped by the clock. No partitions for an empty
        forest.

    Raises:
        ValueError: a budget below 1, a negative time limit, an unknown solver.
        ImportError: a solver is asked and OR-Tools is not installed.
    """
    if max_tokens < 1:
        raise ValueError(f"max_tokens: expected at least 1 unique token, received {max_tokens}")
    if not time_limit_s >= 0:
        raise ValueError(f"time_limit_s: expected 0 seconds or more, received {time_limit_s}")
    if solver not in ("auto", "heuristic", "cp_sat"):
        raise ValueError(f"solver: expected auto, heuristic or cp_sat, received {solver!r}")
    problem = reduce_forest(forest, max_tokens)
    greedy, has_fewest = greedy_cuts(problem)
    bound = greedy.partitions if has_fewest else fewest_partitions(problem)
    cuts, is_optimal, solved_by = _choose(problem, greedy, bound, solver, time_limit_s)
    return lay_out_partitions(
        forest,
        problem,
        cuts,
        lower_bound=cuts.partitions if is_optimal else bound,
        solver=solved_by,
        is_optimal=is_optimal,
    )


def _choose(
    problem: CutProblem, greedy: Cuts, bound: int, solver: str, time_limit_s: float
) -> tuple[Cuts, bool, SolverName]:
    """The cuts of the chosen solver, whether they are proven best, and who found them."""
    if solver == "heuristic" or _is_best(problem, greedy, bound):
        return greedy, _is_best(problem, greedy, bound), "heuristic"
    if solver == "auto":
        exact = exact_cuts(problem, greedy)
        if exact is not None:
            return exact, True, "dynamic_programming"
        if not _is_small(problem):
            return greedy, False, "heuristic"
    from tree_rl.tree.partition.solver import improve_cuts

    cuts, is_optimal = improve_cuts(problem, greedy, bound, time_limit_s=time_limit_s)
    return cuts, is_optimal, "heuristic" if cuts is greedy else "cp_sat"


def _is_best(problem: CutProblem, cuts: Cuts, fewest: int) -> bool:
    """Whether all three aims are at a bound."""
    if cuts.partitions > fewest or cuts.relayed_tokens > least_relayed(problem, fewest):
        return False
    return cuts.depth <= least_depth(problem, cuts.relayed_tokens)


def _is_small(problem: CutProblem) -> bool:
    return len(problem.length) <= MODEL_ITEMS and problem.num_pairs <= MODEL_PAIRS
