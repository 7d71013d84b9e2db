"""Host time and quality of partition plans on one core. Run: OMP_NUM_THREADS=1 python benchmarks/partition_forest.py"""

import argparse
import platform
import time
from collections.abc import Callable
from functools import partial

import numpy as np

from tree_rl.tree import Forest
from tree_rl.tree.partition import PartitionPlan, plan_partitions
from tree_rl.tree.partition.heuristic import fewest_partitions
from tree_rl.tree.partition.problem import reduce_forest

Rows = list[np.ndarray]


def bushy(num_rows: int, length: int) -> Rows:
    """Short rows over eight ids: many branches close to the root."""
    return list(np.random.default_rng(0).integers(0, 8, (num_rows, length), dtype=np.int64))


def comb(teeth: int, step: int) -> Rows:
    """A tooth of random length leaves the spine every ``step`` tokens."""
    draw = np.random.default_rng(1)
    lengths = draw.integers(1, 4 * step, teeth)
    return [np.concatenate([np.zeros(k * step), np.ones(lengths[k - 1])]).astype(int) for k in range(1, teeth + 1)]


def star(branches: int, prefix: int) -> Rows:
    """Answers of random length to one prompt."""
    draw = np.random.default_rng(2)
    lengths = draw.integers(50, 2_000, branches)
    return [np.concatenate([np.zeros(prefix), np.full(size, row + 1)]).astype(int) for row, size in enumerate(lengths)]


def binary(levels: int, length: int) -> Rows:
    """A complete binary tree of segments of random length."""
    draw = np.random.default_rng(3)
    size = draw.integers(1, 2 * length, (levels, 1 << levels))
    rows = []
    for leaf in range(1 << levels):
        bits = [(leaf >> (levels - level - 1), level) for level in range(levels)]
        rows.append(np.concatenate([np.full(size[level, prefix], prefix & 1) for prefix, level in bits]))
    return rows


def agents(groups: int, sessions: int, turns: int, *, seed: int = 4) -> Rows:
    """Sessions that leave one another at random turns: system prompt, then turns of very unequal length."""
    draw = np.random.default_rng(seed)
    rows: Rows = []
    for group in range(groups):
        prompt = np.concatenate([[group], draw.integers(0, 150_000, 1_500)])
        members = [[prompt]]
        for _ in range(sessions - 1):
            source = members[int(draw.integers(len(members)))]
            members.append(source[: int(draw.integers(1, len(source) + 1))])
            for _ in range(int(draw.integers(1, turns))):
                size = int(np.clip(draw.lognormal(6, 1), 5, 9_000))
                members[-1].append(draw.integers(0, 150_000, size))
        rows += [np.concatenate(member) for member in members]
    return rows


LARGE: dict[str, tuple[Callable[[], Rows], int]] = {
    "bushy, C = 16": (lambda: bushy(3_200, 12), 16),
    "bushy, C = 2,048": (lambda: bushy(3_200, 12), 2_048),
    "comb, C = 256": (lambda: comb(2_500, 4), 256),
    "comb, C = 1": (lambda: comb(2_500, 1), 1),
    "star, C = 4,096": (lambda: star(5_000, 1_000), 4_096),
    "star, C = 65,536": (lambda: star(5_000, 1_000), 65_536),
    "binary, C = 4,096": (lambda: binary(12, 200), 4_096),
    "16 agent trees, C = 16,384": (lambda: agents(16, 160, 10), 16_384),
    "16 agent trees, C = 65,536": (lambda: agents(16, 160, 10), 65_536),
}
SMALL: dict[str, tuple[Callable[[], Rows], int]] = {
    "bushy, C = 64": (lambda: bushy(120, 12), 64),
    "comb, C = 64": (lambda: comb(60, 4), 64),
    "star of 24, C = 4,096": (lambda: star(24, 1_000), 4_096),
    "star of 60, C = 8,192": (lambda: star(60, 1_000), 8_192),
    "binary, C = 2,048": (lambda: binary(7, 200), 2_048),
    "agent tree of 24, C = 16,384": (lambda: agents(1, 24, 12), 16_384),
    "agent tree of 64, C = 16,384": (lambda: agents(1, 64, 12, seed=5), 16_384),
    "agent tree of 64, C = 32,768": (lambda: agents(1, 64, 12, seed=6), 32_768),
    "4 agent trees of 32, C = 32,768": (lambda: agents(4, 32, 12), 32_768),
}


def timed(work: Callable[[], PartitionPlan]) -> tuple[PartitionPlan, float]:
    """A plan and the wall time of making it."""
    begin = time.perf_counter()
    plan = work()
    return plan, time.perf_counter() - begin


def main() -> None:
    """Print one line per case: partitions / relayed tokens / depth of both planners."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--limit-s", type=float, default=0.5, help="time limit of the solver")
    limit = parser.parse_args().limit_s
    plan_partitions(Forest.from_rows([[1, 2]]), 1, solver="cp_sat")
    print(f"python {platform.python_version()}, numpy {np.__version__}, {platform.machine()}, solver limit {limit} s")
    print(
        f"{'forest':<34}{'segments':>9}{'unique':>11}{'items':>7}{'bound':>7}{'heuristic':>26}{'ms':>8}"
        f"{'auto':>26}{'ms':>8}{'util':>6}  proof"
    )
    for name, (make, budget) in (LARGE | SMALL).items():
        forest = Forest.from_rows(make())
        quick, quick_s = timed(partial(plan_partitions, forest, budget, solver="heuristic"))
        best, best_s = timed(partial(plan_partitions, forest, budget, time_limit_s=limit))
        problem = reduce_forest(forest, budget)
        bound = max(best.lower_bound, fewest_partitions(problem))
        print(
            f"{name:<34}{forest.num_segments:>9,}{forest.num_unique:>11,}{len(problem.length):>7,}{bound:>7,}"
            f"{score(quick):>26}{1e3 * quick_s:>8.0f}{score(best):>26}{1e3 * best_s:>8.0f}{best.utilisation:>6.0%}"
            f"  {'optimal' if best.is_optimal else 'fewest' if best.num_partitions == bound else 'none'}"
        )


def score(plan: PartitionPlan) -> str:
    """Partitions, relayed tokens and depth."""
    return f"{plan.num_partitions:,} / {plan.relayed_tokens:,} / {plan.depth:,}"


if __name__ == "__main__":
    main()
