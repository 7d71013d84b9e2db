"""Half-open intervals (start, end) on a line."""

from itertools import pairwise


def merge(intervals):
    """Join overlapping and touching intervals; the result is sorted and disjoint."""
    merged = []
    for start, end in sorted(intervals):
        if end <= start:
            continue
        if merged and start <= merged[-1][1]:
            merged[-1] = (merged[-1][0], max(merged[-1][1], end))
        else:
            merged.append((start, end))
    return merged


def total_length(intervals):
    return sum(end - start for start, end in merge(intervals))


def gaps(intervals):
    """The free intervals between the first start and the last end."""
    merged = merge(intervals)
    return [(a[1], b[0]) for a, b in pairwise(merged)]
