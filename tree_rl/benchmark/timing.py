"""Times of a call on the device: groups of repeats with a cold L2 cache, median and range over the groups."""

import statistics
import time
from collections.abc import Callable

import torch

from tree_rl.benchmark.results import Spread

GROUPS = 3
FLUSH_BYTES = 256 * 2**20
"""More than any L2 cache."""


class Timer:
    """Times calls on one device."""

    def __init__(self, device: torch.device, *, group_seconds: float) -> None:
        """Take a buffer that flushes the cache.

        Args:
            device: where calls run.
            group_seconds: how long a group of repeats lasts, about; a group has at least one repeat.
        """
        self._device = device
        self._group_seconds = group_seconds
        self._is_cuda = device.type == "cuda"
        self._buffer = torch.empty(FLUSH_BYTES if self._is_cuda else 0, dtype=torch.int8, device=device)

    def milliseconds(self, run: Callable[[], object]) -> Spread:
        """Median over all groups' medians, smallest and largest of them; the first two calls are not counted."""
        repeats = self._warm_up(run)
        return Spread.of([self._group(run, repeats) for _ in range(GROUPS)])

    def one_group(self, run: Callable[[], object]) -> float:
        """Median milliseconds of one group; the first two calls are not counted."""
        return self._group(run, self._warm_up(run))

    def _warm_up(self, run: Callable[[], object]) -> int:
        """Repeats of a group, after two calls."""
        run()
        expected = self._group(run, 1)
        return max(1, min(50, round(self._group_seconds * 1e3 / max(expected, 1e-3))))

    def _group(self, run: Callable[[], object], repeats: int) -> float:
        """Median milliseconds of some repeats."""
        if not self._is_cuda:
            times = []
            for _ in range(repeats):
                began = time.perf_counter()
                run()
                times.append((time.perf_counter() - began) * 1e3)
            return statistics.median(times)
        marks = []
        for _ in range(repeats):
            self._buffer.zero_()
            start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            start.record()
            run()
            end.record()
            marks.append((start, end))
        torch.cuda.synchronize(self._device)
        return statistics.median(start.elapsed_time(end) for start, end in marks)
