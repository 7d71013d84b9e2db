"""Where the time of an update goes: its phases on the device's own clock, and the host's time to plan."""

import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch

PLAN, OLD_LOG_PROBS, FORWARD, BACKWARD, OPTIMIZER = "plan", "old_log_probs", "forward", "backward", "optimizer"
PHASES = (PLAN, OLD_LOG_PROBS, FORWARD, BACKWARD, OPTIMIZER)
"""Phases of an update over packed rows or trees."""
UPDATE = "update"
"""Forward, backward and optimizer together, as a verl worker runs them."""


@dataclass(frozen=True, kw_only=True, slots=True)
class UpdateTimes:
    """One update."""

    seconds: float
    """Time from the start until the device is done."""
    phases: dict[str, float]
    """Seconds of each phase on the device's clock; `PLAN` is the time in which the device waited for a plan."""
    peak_bytes: int
    """Most memory allocated; 0 on the CPU."""


class Stopwatch:
    """Marks phases in the device's stream; nothing waits before `stop`."""

    def __init__(self, device: torch.device) -> None:
        self._cuda = device.type == "cuda"
        if self._cuda:
            torch.cuda.synchronize(device)
            torch.cuda.reset_peak_memory_stats(device)
        self._device = device
        self._spans: list[tuple[str, Any, Any]] = []
        self._started = time.perf_counter()

    @contextmanager
    def phase(self, name: str) -> Iterator[None]:
        """Count what is queued inside towards a phase; a name may come again."""
        start = self._mark()
        yield
        self._spans.append((name, start, self._mark()))

    def stop(self) -> UpdateTimes:
        """Wait for the device and add up."""
        if self._cuda:
            torch.cuda.synchronize(self._device)
        seconds = time.perf_counter() - self._started
        phases: dict[str, float] = {}
        for name, start, end in self._spans:
            spent = start.elapsed_time(end) / 1e3 if self._cuda else end - start
            phases[name] = phases.get(name, 0.0) + spent
        peak_bytes = torch.cuda.max_memory_allocated(self._device) if self._cuda else 0
        return UpdateTimes(seconds=seconds, phases=phases, peak_bytes=peak_bytes)

    def _mark(self) -> Any:
        """Now: an event in the device's stream, or the host's seconds without a GPU."""
        if not self._cuda:
            return time.perf_counter()
        event = torch.cuda.Event(enable_timing=True)
        event.record()
        return event
