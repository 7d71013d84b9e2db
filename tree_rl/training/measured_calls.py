"""Times the training calls of a step and fits the cost model to them, alike on all ranks.

Ranks run in lock-step, so a call takes as long as its slowest rank: that rank's work and the longest time make one
equation. A call's time is read, and told to the other ranks, when the next one is planned: nothing waits for the GPU.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch

from tree_rl.cost.cost_fit import CostFit, Work
from tree_rl.cost.cost_model import CostModel, ModelShape
from tree_rl.training.micro_batch import MicroBatch
from tree_rl.training.rows import Rows

Stamp = torch.cuda.Event | float
"""A moment: on the device, or `perf_counter` of a CPU."""


@dataclass(frozen=True, kw_only=True, slots=True)
class MeasuredCall:
    """One rank's part in a call."""

    work: Work
    seconds: float
    predicted_seconds: float | None
    """Seconds by the coefficients that were known before it ran; None where there were none."""


@dataclass(frozen=True, kw_only=True, slots=True)
class _Running:
    work: Work
    predicted_seconds: float | None
    start: Stamp
    end: Stamp


class MeasuredCalls:
    """What a step's updates have taken so far."""

    def __init__(self, shape: ModelShape | None, *, decides: bool = True) -> None:
        """Start without knowledge.

        Args:
            shape: of the model; None measures nothing.
            decides: whether measured times may change how rows run. Results then differ by rounding between equal
                runs.
        """
        self._start = None if shape is None else shape.cost
        self.fit = None if self._start is None else CostFit(self._start)
        self._decides = decides
        self._last: _Running | None = None
        self.error: float | None = None
        """Predicted over measured seconds of the last update that was predicted, less 1, absolute."""

    @property
    def fitted(self) -> CostModel | None:
        """Seconds by which rows may be laid out; None while they are unknown, or where they shall not decide."""
        return self.fit.model if self.fit is not None and self._decides else None

    @property
    def model(self) -> CostModel | None:
        """The fitted coefficients, else those of the model's shape; None where its sizes are unknown."""
        return self.fitted or self._start

    def note(self, rows: Rows, batches: Sequence[MicroBatch], start: Stamp, end: Stamp) -> None:
        """Keep an update that has run until its time is asked for.

        Args:
            rows: of the call.
            batches: how they ran.
            start: of its first op.
            end: of its last op; the device may not be there yet.
        """
        if self.fit is None:
            return
        work = work_of(rows, batches)
        predicted = None if self.fit.model is None else _seconds(self.fit.model, work)
        self._last = _Running(work=work, predicted_seconds=predicted, start=start, end=end)

    def take_last(self) -> MeasuredCall | None:
        """The update that was timed last, once; None where there is none."""
        last, self._last = self._last, None
        if last is None:
            return None
        return MeasuredCall(
            work=last.work, seconds=_between(last.start, last.end), predicted_seconds=last.predicted_seconds
        )

    def learn(self, calls_of_ranks: Sequence[MeasuredCall | None]) -> None:
        """Add an update that all ranks have measured, each its own part."""
        calls = [call for call in calls_of_ranks if call is not None]
        if self.fit is None or self._start is None or len(calls) < len(calls_of_ranks) or not calls:
            return
        seconds = max(call.seconds for call in calls)
        predicted = [call.predicted_seconds for call in calls if call.predicted_seconds is not None]
        if predicted and seconds > 0:
            self.error = abs(max(predicted) / seconds - 1)
        start = self._start
        self.fit.add(max((call.work for call in calls), key=lambda work: _seconds(start, work)), seconds)


def work_of(rows: Rows, batches: Sequence[MicroBatch]) -> Work:
    """What micro-batches compute, those without a tree row by row."""
    forwards = tokens = pairs = head_tokens = 0
    for batch in batches:
        forwards += batch.num_partitions
        tokens += batch.unique_tokens
        forest = batch.forest
        if forest is None:
            lengths = np.diff(batch.offsets).astype(np.int64)
            pairs += int((lengths * (lengths + 1) // 2).sum())
            head_tokens += batch.unique_tokens
            continue
        pairs += forest.num_pairs
        wanted = forest.row_index.with_values(rows.wanted_F[rows.flat_positions(batch.rows)])
        head_tokens += int(np.count_nonzero(forest.rows_that_mark(wanted)))
    return Work(forwards=forwards, tokens=tokens, pairs=pairs, head_tokens=head_tokens)


def _seconds(model: CostModel, work: Work) -> float:
    return model.per_forward * work.forwards + model.step(work.tokens, work.pairs, work.head_tokens)


def _between(start: Stamp, end: Stamp) -> float:
    if isinstance(start, torch.cuda.Event) and isinstance(end, torch.cuda.Event):
        # The next call is being planned: the device has long passed it.
        end.synchronize()
        return start.elapsed_time(end) / 1e3
    assert isinstance(start, float) and isinstance(end, float)
    return end - start
