"""The forests of the benchmarks. Every tree is laid out by the planner, heaviest subtree first.

Legend: S segments, N unique tokens, B rows.
"""

import itertools
import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import numpy as np

from tree_rl.tree import Forest

RECORDED = Path(__file__).with_name("recorded_trees.json")
TURNS = 60
LEAVES = 16
BINARY_LEVELS = 7
TINY_SEGMENT = (10, 101)
"""Tokens of a tiny segment: at least, below."""
GOES_ON = 0.7
"""Chance that a tiny segment continues the last one instead of a random one."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Segments:
    """A tree before it is laid out."""

    parents: Sequence[int]
    """[S], a smaller index, or -1 at a root."""
    lengths: Sequence[int]
    """[S], tokens."""
    row_ends: Sequence[int] | None = None
    """[B], segment in which each row ends; None: one row per leaf."""

    def forest(self) -> Forest:
        """The rows, each token with an id of its own, as the planner lays them out."""
        starts = np.concatenate([[0], np.cumsum(self.lengths)])
        inner = set(self.parents)
        ends = [s for s in range(len(self.parents)) if s not in inner] if self.row_ends is None else self.row_ends
        return Forest.from_rows([self._row(end, starts) for end in ends])

    def _row(self, end: int, starts: np.ndarray) -> np.ndarray:
        pieces = []
        segment = end
        while segment >= 0:
            pieces.append(np.arange(starts[segment], starts[segment + 1]))
            segment = self.parents[segment]
        return np.concatenate(pieces[::-1])


def causal(tokens: int) -> Segments:
    """One row."""
    return Segments(parents=[-1], lengths=[tokens])


def chains(tokens: int) -> Segments:
    """Rows that share nothing."""
    return Segments(parents=[-1] * LEAVES, lengths=_split(tokens, LEAVES))


def grpo(tokens: int) -> Segments:
    """A prompt of 4,096 tokens (a quarter of a small tree) under 16 answers."""
    prompt = min(4096, tokens // 4)
    return Segments(parents=[-1] + [0] * LEAVES, lengths=[prompt, *_split(tokens - prompt, LEAVES)])


def stubs(tokens: int) -> Segments:
    """A trunk of 60 turns; at each a stub of half a turn leaves it, as reasoning that is dropped later."""
    stub = max(1, 500 * tokens // 65_536)
    parents, lengths, trunk = [], [], -1
    for turn in _split(tokens - stub * TURNS, TURNS):
        parents += [trunk, len(parents)]
        lengths += [turn, stub]
        trunk = len(parents) - 2
    return Segments(parents=parents, lengths=lengths)


def binary(tokens: int) -> Segments:
    """A balanced binary tree of 127 equal segments."""
    count = 2**BINARY_LEVELS - 1
    return Segments(parents=[-1] + [(s - 1) // 2 for s in range(1, count)], lengths=_split(tokens, count))


def tiny_segments(tokens: int) -> Segments:
    """A random tree of segments of 10 to 100 tokens."""
    draw = np.random.default_rng(0)
    parents: list[int] = []
    lengths: list[int] = []
    while (left := tokens - sum(lengths)) > 0:
        goes_on = not parents or draw.random() < GOES_ON
        parents.append(len(parents) - 1 if goes_on else int(draw.integers(len(parents))))
        lengths.append(min(int(draw.integers(*TINY_SEGMENT)), left))
    return Segments(parents=parents, lengths=lengths)


def recorded(kind: str, tokens: int) -> Segments:
    """Recorded airline agents, task after task, until there are about enough tokens.

    Args:
        kind: "trial" or "call", what became a row.
        tokens: unique tokens to reach.
    """
    trees = json.loads(RECORDED.read_text(encoding="utf-8"))[kind]
    parents: list[int] = []
    lengths: list[int] = []
    ends: list[int] = []
    for tree in itertools.cycle(trees):
        offset, left = len(parents), tokens - sum(lengths)
        if left <= 0:
            break
        # The last tree is shrunk to fit.
        scale = min(1.0, left / sum(tree["lengths"]))
        parents += [parent + offset if parent >= 0 else -1 for parent in tree["parents"]]
        lengths += [max(1, round(length * scale)) for length in tree["lengths"]]
        ends += [end + offset for end in tree["row_ends"]]
    return Segments(parents=parents, lengths=lengths, row_ends=ends)


SHAPES: dict[str, Callable[[int], Segments]] = {
    "causal": causal,
    "chains": chains,
    "grpo": grpo,
    "stubs": stubs,
    "binary": binary,
    "tiny": tiny_segments,
    "recorded trial": partial(recorded, "trial"),
    "recorded call": partial(recorded, "call"),
}
"""Name -> tree of about so many unique tokens."""


def _split(tokens: int, parts: int) -> list[int]:
    """Nearly equal lengths of at least one token."""
    edges = np.linspace(0, max(tokens, parts), parts + 1).astype(int)
    return np.diff(edges).tolist()
