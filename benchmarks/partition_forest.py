"""Host time and quality of partition plans on one core. Run: OMP_NUM_THREADS=1 python benchmarks/partition_forest.py"""

import argparse
import importlib
import json
import platform
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import numpy as np

from tree_rl.tree import Forest
from tree_rl.tree.partition import PartitionPlan, plan_partitions
from tree_rl.tree.partition.heuristic import greedy_cuts
from tree_rl.tree.partition.problem import Cuts, reduce_forest

ROOT = Path(__file__).parents[1]
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


RECORDED_BUDGETS = (1_024, 2_048, 4_096, 8_192, 16_384)


def recorded() -> Iterator[tuple[str, list[Forest], int]]:
    """The recorded trees that exceed a budget, one forest each as with `tree.scope: uid`."""
    trees = json.loads((ROOT / "kernels" / "benchmarks" / "attention" / "recorded_trees.json").read_text("utf-8"))
    for kind, topologies in trees.items():
        forests = [rebuild(**topology) for topology in topologies]
        for budget in RECORDED_BUDGETS:
            beyond = [forest for forest in forests if forest.num_unique > budget]
            if beyond:
                yield f"{len(beyond)} recorded by {kind}, C = {budget:,}", beyond, budget


def rebuild(parents: list[int], lengths: list[int], row_ends: list[int]) -> Forest:
    """A forest of the recorded shape, each token with an id of its own."""
    offsets = np.concatenate([[0], np.cumsum(lengths)])
    rows = []
    for end in row_ends:
        path = []
        while end >= 0:
            path.append(np.arange(offsets[end], offsets[end + 1]))
            end = parents[end]
        rows.append(np.concatenate(path[::-1]))
    return Forest.from_rows(rows)


def drawn() -> Iterator[tuple[str, list[Forest], int]]:
    """Drawn forests, and twenty agent trees for each of three budgets."""
    for name, (make, budget) in (LARGE | SMALL).items():
        yield name, [Forest.from_rows(make())], budget
    for budget in (8_192, 16_384, 32_768):
        trees = [Forest.from_rows(agents(1, 64, 12, seed=seed)) for seed in range(100, 120)]
        yield f"20 agent trees of 64, C = {budget:,}", trees, budget


@dataclass(kw_only=True)
class Score:
    """Sums over forests."""

    partitions: int = 0
    relayed_tokens: int = 0
    depth: int = 0
    seconds: float = 0.0
    proven: int = 0

    def add(self, plan: PartitionPlan | Cuts, seconds: float, *, is_optimal: bool) -> None:
        """Add one forest."""
        self.partitions += plan.num_partitions if isinstance(plan, PartitionPlan) else plan.partitions
        self.relayed_tokens += plan.relayed_tokens
        self.depth += plan.depth
        self.seconds += seconds
        self.proven += is_optimal

    def __str__(self) -> str:
        figures = f"{self.partitions:,} / {self.relayed_tokens:,} / {self.depth:,}"
        return f"{figures:>27}{1e3 * self.seconds:>8,.0f}{self.proven:>4}"


def plan_all(forests: list[Forest], budget: int, solver: Literal["auto", "heuristic"], limit_s: float) -> Score:
    """Plans of the product."""
    score = Score()
    for forest in forests:
        begin = time.perf_counter()
        plan = plan_partitions(forest, budget, solver=solver, time_limit_s=limit_s)
        score.add(plan, time.perf_counter() - begin, is_optimal=plan.is_optimal)
    return score


def search_all(forests: list[Forest], budget: int) -> Score:
    """Cuts of the tests' dynamic program within its limit of work, and the heuristic's where that ends it."""
    oracle = importlib.import_module("partition_oracle")
    score = Score()
    for forest in forests:
        begin = time.perf_counter()
        problem = reduce_forest(forest, budget)
        greedy, _ = greedy_cuts(problem)
        exact = oracle.exact_cuts(problem, greedy)
        score.add(exact or greedy, time.perf_counter() - begin, is_optimal=exact is not None)
    return score


def main() -> None:
    """Print one line per case: partitions / relayed tokens / depth, ms and proofs of each planner."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--limit-s", type=float, default=0.2, help="time limit of the solver for each forest")
    parser.add_argument("--search", action="store_true", help="compare with the dynamic program of tests/tree")
    arguments = parser.parse_args()
    sys.path.append(str(ROOT / "tests" / "tree"))
    plan_partitions(Forest.from_rows([[1, 1, 2], [1, 1, 3], [1, 4]]), 2, solver="cp_sat")
    print(f"python {platform.python_version()}, numpy {np.__version__}, {platform.machine()}, {arguments}")
    columns = ("heuristic", "auto", *(["dynamic program"] if arguments.search else []))
    print(f"{'forests':<38}{'items':>7}" + "".join(f"{name:>27}{'ms':>8}{'opt':>4}" for name in columns))
    for name, forests, budget in (*recorded(), *drawn()):
        items = sum(len(reduce_forest(forest, budget).length) for forest in forests)
        scores = [plan_all(forests, budget, solver, arguments.limit_s) for solver in ("heuristic", "auto")]
        scores += [search_all(forests, budget)] if arguments.search else []
        print(f"{name:<38}{items:>7,}" + "".join(map(str, scores)), flush=True)


if __name__ == "__main__":
    main()
