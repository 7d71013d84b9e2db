"""How much of a device may be filled, and how a measured peak corrects the memory model."""

from collections.abc import Callable

from tree_rl.cost.memory.model import MemoryModel

MEMORY_FRACTION = 0.8
"""Share of the device that may be filled; the rest is left for memory fragmentation."""
GRANULARITY = 1024
"""Token budgets are positive multiples of this; shorter forwards leave the GPU idle."""
LEAST_SCALE, LARGEST_SCALE = 0.5, 4.0
"""Limits for the measured working set over the predicted one; beyond them something else caused the difference."""
SCALE_STEP = 0.01


def room_beside(taken_bytes: float, device_bytes: float) -> float:
    """Bytes available to forwards on a device where weights, gradients and optimizer state take `taken_bytes`."""
    return MEMORY_FRACTION * device_bytes - taken_bytes


def working_scale(model: MemoryModel, predicted: Callable[[MemoryModel], float], measured_bytes: float) -> float:
    """The `MemoryModel.working_scale` with which the predicted peak of an update equals the measured one, by bisection.

    Args:
        model: memory model with any scale.
        predicted: predicts the update's peak bytes from a memory model; 0 without rows.
        measured_bytes: measured peak without weights, gradients and optimizer state.
    """
    low, high = LEAST_SCALE, LARGEST_SCALE
    if predicted(model.scaled(high)) <= 0:
        return low
    while high - low > SCALE_STEP:
        middle = (low + high) / 2
        low, high = (middle, high) if predicted(model.scaled(middle)) < measured_bytes else (low, middle)
    return high


def rounded_tokens(tokens: float) -> int:
    """Round down to a multiple of `GRANULARITY`, but not to 0."""
    return max(1, int(tokens) // GRANULARITY) * GRANULARITY
