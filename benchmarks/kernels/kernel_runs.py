"""What the benchmarks of kernels share: the command line, the gate before every time, times and their columns."""

import argparse
import statistics
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

from tree_rl.benchmark.results import Columns, Spread

GROUPS = 3
FLUSH_BYTES = 256 * 2**20
"""More than any L2 cache."""


class Timer:
    """Times calls on one device in groups of repeats with a cold L2 cache; a group lasts about `group_seconds`."""

    def __init__(self, device: torch.device, *, group_seconds: float) -> None:
        self._group_seconds, self._is_cuda = group_seconds, device.type == "cuda"
        self._buffer = torch.empty(FLUSH_BYTES if self._is_cuda else 0, dtype=torch.int8, device=device)

    def milliseconds(self, run: Callable[[], object]) -> Spread:
        """Median, smallest and largest of the groups' medians; the first two calls are not counted."""
        repeats = self._repeats(run)
        return Spread.of([self._median(run, repeats) for _ in range(GROUPS)])

    def one_group(self, run: Callable[[], object]) -> float:
        """Median milliseconds of one group; the first two calls are not counted."""
        return self._median(run, self._repeats(run))

    def _repeats(self, run: Callable[[], object]) -> int:
        run()
        expected = max(self._median(run, 1), 1e-3)
        return max(1, min(50, round(self._group_seconds * 1e3 / expected)))

    def _median(self, run: Callable[[], object], repeats: int) -> float:
        if self._is_cuda:
            marks = [[torch.cuda.Event(enable_timing=True) for _ in range(2)] for _ in range(repeats)]
            for start, end in marks:
                self._buffer.zero_()
                start.record()
                run()
                end.record()
            torch.cuda.synchronize(self._buffer.device)
            return statistics.median(start.elapsed_time(end) for start, end in marks)
        times = []
        for _ in range(repeats):
            began = time.perf_counter()
            run()
            times.append((time.perf_counter() - began) * 1e3)
        return statistics.median(times)


class GateError(RuntimeError):
    """A contender computes something else; its time would mean nothing."""


def parser(description: str | None, *, group_seconds: float) -> argparse.ArgumentParser:
    """A command line with the options that all of them have."""
    made = argparse.ArgumentParser(description=description, formatter_class=argparse.RawDescriptionHelpFormatter)
    made.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    made.add_argument("--dtype", choices=("bfloat16", "float16", "float32"), help="default bfloat16, on a CPU float32")
    made.add_argument("--group-seconds", type=float, default=group_seconds, help="length of a group of repeats")
    made.add_argument("--commit", help="outside a git checkout")
    made.add_argument("--out", type=Path, help="CSV to write")
    return made


def device_and_dtype(args: argparse.Namespace) -> tuple[torch.device, torch.dtype]:
    """Where and in what type to run."""
    device = torch.device(args.device)
    return device, getattr(torch, args.dtype or ("bfloat16" if device.type == "cuda" else "float32"))


def require_exact(
    contender: str, names: Sequence[str], got: Iterable[torch.Tensor], truth: Iterable[torch.Tensor], limit: float
) -> float:
    """Largest relative error (norm) of some tensors.

    Raises:
        GateError: it is beyond the limit, or no number.
    """
    pairs = zip(got, truth, strict=True)
    found = [float(((one.to(true.dtype) - true).norm() / true.norm()).detach()) for one, true in pairs]
    errors = dict(zip(names, found, strict=True))
    if not all(error <= limit for error in errors.values()):
        named = ", ".join(f"{name} {error:.2g}" for name, error in errors.items())
        raise GateError(f"{contender}: expected errors of at most {limit:.2g}, received {named}")
    return max(errors.values())


def passes(
    run: Callable[..., torch.Tensor], leaves: Sequence[torch.Tensor], gradient: torch.Tensor
) -> dict[str, Callable[[], object]]:
    """What is timed, by name: the forward alone, and forward and backward."""

    def forward() -> None:
        with torch.no_grad():
            run(*leaves)

    return {"forward": forward, "total": lambda: torch.autograd.grad(run(*leaves), leaves, gradient)}


def spread_columns(name: str, spread: Spread, scale: float = 1.0) -> Columns:
    """Milliseconds of a pass."""
    values = {"": spread.median, "_low": spread.low, "_high": spread.high}
    return {f"{name}_ms{suffix}": value * scale for suffix, value in values.items()}


def time_cells(row: Mapping[str, Any]) -> tuple[str, str, str]:
    """Milliseconds of both passes and the range of the second, for a table."""
    return (
        f"{row['forward_ms']:.2f}",
        f"{row['total_ms']:.2f}",
        f"{row['total_ms_low']:.2f} to {row['total_ms_high']:.2f}",
    )


def printed_reasons(rows: Iterable[Columns]) -> Iterator[Columns]:
    """The same rows; why a contender did not run is printed."""
    for row in rows:
        if "not_run" in row:
            print(f"{row['contender']} on {row['shape']}: not run, {row['not_run']}", flush=True)
        yield row
