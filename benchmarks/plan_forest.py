"""Time and memory of planning a forest on one core. Run: OMP_NUM_THREADS=1 python benchmarks/plan_forest.py"""

import platform
import statistics
import time
import tracemalloc
from collections.abc import Callable
from functools import partial

import numpy as np

from tree_rl.tree import Forest, measure_forest, pack_groups

Rows = list[np.ndarray]
REPEATS = 3


def cut_at_random(num_rows: int, length: int, *, same: float) -> Rows:
    """Rows that leave one long row at a random token; a share of them not at all."""
    draw = np.random.default_rng(0)
    common = draw.integers(0, 150_000, length, dtype=np.int64)
    rows = [common.copy() for _ in range(num_rows)]
    for row in rows[int(same * num_rows) :]:
        cut = int(draw.integers(0, length))
        row[cut:] = draw.integers(0, 150_000, length - cut)
    return rows


def unrelated(num_rows: int, length: int) -> Rows:
    """Rows without a shared prefix."""
    return list(np.random.default_rng(0).integers(0, 150_000, (num_rows, length), dtype=np.int64))


def bushy(num_rows: int, length: int) -> Rows:
    """Short rows over eight ids: many branches close to the root."""
    return list(np.random.default_rng(0).integers(0, 8, (num_rows, length), dtype=np.int64))


def comb(teeth: int) -> Rows:
    """Row k leaves a spine after k tokens: about two segments per row, as deep as there are rows."""
    return [np.append(np.zeros(k, dtype=np.int32), 1) for k in range(1, teeth + 1)]


CASES: dict[str, Callable[[], Rows]] = {
    "512 x 32k, random cuts": lambda: cut_at_random(512, 32_768, same=0.1),
    "512 x 32k, no overlap": lambda: unrelated(512, 32_768),
    "512 x 32k, identical": lambda: cut_at_random(512, 32_768, same=1.0),
    "50,000 x 20, bushy": lambda: bushy(50_000, 20),
    "comb of 5,000 segments": lambda: comb(2_500),
    "comb of 10,000 segments": lambda: comb(5_000),
    "one row of 1 M": lambda: unrelated(1, 1_000_000),
}


def median_seconds(work: Callable[[], object]) -> float:
    """Median wall time of a few calls."""
    times = []
    for _ in range(REPEATS):
        begin = time.perf_counter()
        work()
        times.append(time.perf_counter() - begin)
    return statistics.median(times)


def main() -> None:
    """Print one line per case."""
    print(f"python {platform.python_version()}, numpy {np.__version__}, {platform.machine()}, median of {REPEATS}")
    print(
        f"{'rows':<26}{'flat':>12}{'unique':>12}{'segments':>10}{'plan s':>9}{'MiB':>8}{'pack s':>9}{'measure s':>11}"
    )
    for name, make in CASES.items():
        rows = make()
        forest = Forest.from_rows(rows)
        plan = median_seconds(partial(Forest.from_rows, rows))
        tracemalloc.start()
        Forest.from_rows(rows)
        extra = tracemalloc.get_traced_memory()[1] / 2**20
        tracemalloc.stop()
        groups = [np.flatnonzero(forest.tree_of_row == tree) for tree in range(min(forest.num_trees, 600))]
        roots = forest.segments.parent == -1
        largest = int((forest.segments.subtree_end - forest.segments.start)[roots].max())
        pack = median_seconds(partial(pack_groups, forest, groups, max_tokens=max(65_536, largest)))
        measure = median_seconds(partial(measure_forest, forest))
        print(
            f"{name:<26}{forest.num_flat:>12,}{forest.num_unique:>12,}{forest.num_segments:>10,}"
            f"{plan:>9.2f}{extra:>8.0f}{pack:>9.3f}{measure:>11.4f}"
        )


if __name__ == "__main__":
    main()
