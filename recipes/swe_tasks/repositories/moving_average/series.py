"""Statistics of a series of measurements."""

from itertools import pairwise


def moving_average(values, window):
    """Means of every run of `window` neighbouring values."""
    if window < 1:
        raise ValueError("window must be positive")
    averages = []
    total = 0.0
    for index, value in enumerate(values):
        total += value
        if index >= window:
            total -= values[index - window]
        if index >= window - 1:
            averages.append(total / window)
    return averages


def largest_jump(values):
    """The largest change between neighbours and where it happens."""
    if len(values) < 2:
        return None
    jumps = [abs(b - a) for a, b in pairwise(values)]
    size = max(jumps)
    return size, jumps.index(size)


def is_rising(values, window=1):
    smooth = moving_average(values, window)
    return all(a < b for a, b in pairwise(smooth))
