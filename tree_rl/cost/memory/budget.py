"""From bytes to a budget of tokens: how much of a device may be filled, and what a measured peak says of the model."""

from collections.abc import Callable

from tree_rl.cost.memory.model import MemoryModel

MEMORY_FRACTION = 0.8
"""Share of the device that model, optimizer and one path of partitions may take; the rest is for fragments."""
GRANULARITY = 1024
"""Budgets are multiples of this many tokens, and never 0: shorter forwards leave the GPU idle."""
LEAST_SCALE, LARGEST_SCALE = 0.5, 4.0
"""A measured working set outside of these, over the counted one, is that of something else."""
SCALE_STEP = 0.01


def room_beside(taken_bytes: float, device_bytes: float) -> float:
    """Bytes that forwards may fill on a device beside weights, gradients and optimizer state."""
    return MEMORY_FRACTION * device_bytes - taken_bytes


def working_scale(model: MemoryModel, predicted: Callable[[MemoryModel], float], measured_bytes: float) -> float:
    """How large a layer's working set is where an update needed so many bytes; the rest of a peak is known exactly.

    Args:
        model: with the working set that its shape gives.
        predicted: peak of the update under a model; 0 without rows.
        measured_bytes: weights, gradients and optimizer state apart.
    """
    low, high = LEAST_SCALE, LARGEST_SCALE
    if predicted(model.scaled(high)) <= 0:
        return low
    while high - low > SCALE_STEP:
        middle = (low + high) / 2
        low, high = (middle, high) if predicted(model.scaled(middle)) < measured_bytes else (low, middle)
    return high


def rounded_tokens(tokens: float) -> int:
    """The nearest budget of at most so many tokens, or the least one."""
    return max(1, int(tokens) // GRANULARITY) * GRANULARITY
