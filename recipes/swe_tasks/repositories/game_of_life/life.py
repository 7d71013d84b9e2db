"""Conway's game of life on an endless plane."""

from collections import Counter


def neighbours(cell):
    x, y = cell
    return [(x + dx, y + dy) for dx in (-1, 0, 1) for dy in (-1, 0, 1) if (dx, dy) != (0, 0)]


def step(alive):
    """One generation: a cell lives with three neighbours, or with two if it lived before."""
    counts = Counter(near for cell in alive for near in neighbours(cell))
    return {cell for cell, count in counts.items() if count == 3 or (count == 2 and cell in alive)}


def read(picture):
    return {(x, y) for y, line in enumerate(picture.splitlines()) for x, mark in enumerate(line) if mark == "#"}


def draw(alive, width, height):
    return "\n".join("".join("#" if (x, y) in alive else "." for x in range(width)) for y in range(height))
