"""In which order programs take their tiles, one for each key block of each head: heads in sections of a few, inside a
section all heads of a key block next to each other.

In DFS order the key blocks that most queries see come first in their tree: prompts and trunks. Head after head, the
long ones of the last head start when little else is left: 132 processors with 32 heads, their time modelled by blocks,
idle for 4 % on a prompt with 16 answers, 12 to 24 % on small segments; in sections of 8 for 0 % and 1 to 10 %.
"""

from typing import Any

import numpy as np

from tree_kernels.layout import TreeLayout

NARROW, WIDE = 4, 8
"""Heads of a section. Wider ones balance better, but fewer programs share a head's queries in the L2 cache. On an H200
a backward in sections of 4 takes 1 to 5 % less time than in sections of 8 on large segments, 3 to 11 % more on small
ones; sections of 16 and 32 are 1 to 9 % slower than of 8 on all but the smallest (docs/log.md)."""
SECTIONS = (NARROW, WIDE)
PROCESSORS = 132
"""Of an H200 or H100."""
KEY_BLOCK = 128


def heads_of_section(layout: TreeLayout, *, window: int | None) -> int:
    """The narrow section where its longest tile takes no longer than a processor's share of the section.

    Args:
        layout: the forest; at least one token.
        window: attention window in tokens of depth, or None.

    Returns:
        One of `SECTIONS`; the wide one where the host does not know the forest, or with a window, which is not counted.
    """
    if layout.on_host is None or window is not None:
        return WIDE
    num_tokens = layout.num_tokens
    queries_N = layout.on_host - np.arange(num_tokens)
    pairs = int(queries_N.sum(dtype=np.int64)) + layout.past_length * num_tokens
    most_queries = num_tokens if layout.past_length else int(queries_N.max())
    return NARROW if PROCESSORS * KEY_BLOCK * most_queries <= NARROW * pairs else WIDE


def tile_at(place: Any, *, blocks: Any, heads: Any, section: int, smaller: Any = min) -> tuple[Any, Any]:
    """Key block and head of the program that starts at `place`; integers of Python or of a kernel.

    Args:
        place: from 0 to blocks * heads - 1.
        blocks: key blocks.
        heads: query heads, any number.
        section: heads of a section.
        smaller: minimum of two such integers.
    """
    first_head = place // (blocks * section) * section
    inside = place - first_head * blocks
    together = smaller(heads - first_head, section)
    block = inside // together
    return block, first_head + inside - block * together
