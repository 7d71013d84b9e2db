"""Times the updates of a step and fits the cost model to them, with the same result on all ranks.

Ranks run in lock-step, so a call takes as long as its slowest rank: that rank's work and the longest time make one
equation. A call's time is read and exchanged when the next call is planned, so nothing waits for the GPU.
"""

from collections.abc import Sequence

import numpy as np
import torch

from tree_rl.cost.cost_fit import CostFit, Work
from tree_rl.cost.cost_model import CostModel, ModelShape
from tree_rl.training.micro_batch import MicroBatch
from tree_rl.training.rows import Rows

Stamp = torch.cuda.Event | float
"""Point in time: a CUDA event, or `perf_counter` on a CPU."""


MeasuredCall = tuple[Work, float]
"""Work and seconds of one rank in a call."""


class MeasuredCalls:
    """Times of a step's updates so far, and the cost model fitted to them."""

    def __init__(self, shape: ModelShape | None, *, decides: bool = True) -> None:
        """Start without measurements.

        Args:
            shape: sizes of the model; None measures nothing.
            decides: True if measured times may change how rows run; equal runs then differ by rounding.
        """
        self._start = None if shape is None else shape.cost
        self.fit = None if self._start is None else CostFit(self._start)
        self._decides = decides
        self._last: tuple[Work, Stamp, Stamp] | None = None
        """Work, start and end of the last update."""
        self.error: float | None = None
        """Absolute relative error, |predicted / measured - 1|, of the last update that had a prediction."""

    @property
    def fitted(self) -> CostModel | None:
        """The fitted cost model; None before it is fitted, or if measured times must not decide how rows run."""
        return self.fit.model if self.fit is not None and self._decides else None

    @property
    def model(self) -> CostModel | None:
        """The fitted cost model, else the one of the model's shape; None if its sizes are unknown."""
        return self.fitted or self._start

    def note(self, rows: Rows, batches: Sequence[MicroBatch], start: Stamp, end: Stamp) -> None:
        """Keep an update until `take_last` reads its time; the device may not have reached `end` yet."""
        if self.fit is not None:
            self._last = work_of(rows, batches), start, end

    def take_last(self) -> MeasuredCall | None:
        """Forget the last noted update and return it with its time; None if there is none."""
        last, self._last = self._last, None
        if last is None:
            return None
        work, start, end = last
        return work, _between(start, end)

    def learn(self, calls_of_ranks: Sequence[MeasuredCall | None]) -> None:
        """Add one update to the fit, given each rank's measurement; skipped if a rank has none."""
        calls = [call for call in calls_of_ranks if call is not None]
        if self.fit is None or self._start is None or len(calls) < len(calls_of_ranks) or not calls:
            return
        seconds = max(seconds for _, seconds in calls)
        model, start = self.fit.model, self._start
        if model is not None and seconds > 0:
            # Nothing was learnt since the call began, so this is what the model predicted of it.
            self.error = abs(max(_seconds(model, work) for work, _ in calls) / seconds - 1)
        self.fit.add(max((work for work, _ in calls), key=lambda work: _seconds(start, work)), seconds)


def work_of(rows: Rows, batches: Sequence[MicroBatch]) -> Work:
    """Counts of what the micro-batches compute; those without a tree compute each row separately."""
    forwards = tokens = pairs = head_tokens = 0
    for batch in batches:
        forwards += batch.num_partitions
        tokens += batch.unique_tokens
        forest = batch.forest
        if forest is None:
            lengths = np.diff(batch.offsets)
            pairs += int((lengths * (lengths + 1) // 2).sum())
        else:
            pairs += forest.num_pairs
        head_tokens += batch.head_tokens(rows)
    return Work(forwards=forwards, tokens=tokens, pairs=pairs, head_tokens=head_tokens)


def _seconds(model: CostModel, work: Work) -> float:
    return model.per_forward * work.forwards + model.step(work.tokens, work.pairs, work.head_tokens)


def _between(start: Stamp, end: Stamp) -> float:
    if isinstance(start, torch.cuda.Event) and isinstance(end, torch.cuda.Event):
        # Called while the next call is planned: the device is usually past this event.
        end.synchronize()
        return start.elapsed_time(end) / 1e3
    assert isinstance(start, float) and isinstance(end, float)
    return end - start
