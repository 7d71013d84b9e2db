"""In which order programs take their tiles, one for each key block of each head: heads in sections of a few, inside a
section all heads of a key block next to each other.

In DFS order the key blocks that most queries see come first in their tree: prompts and trunks. Head after head, the
long ones of the last head start when little else is left: 132 processors with 32 heads, their time modelled by blocks,
idle for 4 % on a prompt with 16 answers, 12 to 24 % on small segments; in sections of 8 for 0 % and 1 to 10 %.
"""

from typing import Any

SECTION = 8
"""Heads of a section. Larger ones balance better, but fewer programs share a head's queries in the L2 cache. On an
H200 with 32 heads, sections of 32 are 3 to 9 % slower than these; of 4, 1 % slower to 2 % faster on large segments and
2 to 16 % slower on small ones of 32,768 tokens; of 16, 2 % faster on small ones and 1 to 3 % slower elsewhere
(docs/log.md)."""


def tile_at(place: Any, *, blocks: Any, heads: Any, smaller: Any = min) -> tuple[Any, Any]:
    """Key block and head of the program that starts at `place`; integers of Python or of a kernel.

    Args:
        place: from 0 to blocks * heads - 1.
        blocks: key blocks.
        heads: query heads, any number.
        smaller: minimum of two such integers.
    """
    first_head = place // (blocks * SECTION) * SECTION
    inside = place - first_head * blocks
    together = smaller(heads - first_head, SECTION)
    block = inside // together
    return block, first_head + inside - block * together
