"""The order of the backward's programs, one per key block and head: heads in sections of a few; within a section, all
heads of a key block are adjacent.

In DFS order the key blocks that most queries see (prompts and trunks) come first. Head by head, the long blocks of the
last head would start late, when little else is left. In a model of 132 processors and 32 heads, processors then idle 4
% of the time on a prompt with 16 answers and 12 to 24 % on small segments; with sections of 8, 0 % and 1 to 10 %.
"""

from typing import Any

SECTION = 8
"""Heads of a section. Larger sections balance better, but fewer programs share a head's queries in the L2 cache. On an
H200 with 32 heads, compared to 8: sections of 32 are 3 to 9 % slower; of 4, 1 % slower to 2 % faster on large segments
and 2 to 16 % slower on small ones of 32,768 tokens; of 16, 2 % faster on small segments and 1 to 3 % slower elsewhere
(docs/log.md)."""


def tile_at(place: Any, *, blocks: Any, heads: Any, smaller: Any = min) -> tuple[Any, Any]:
    """Key block and head of program `place` in [0, blocks * heads).

    Also compiled into a kernel: arguments are Python's or the kernel's integers, and `smaller` is their minimum.
    """
    first_head = place // (blocks * SECTION) * SECTION
    inside = place - first_head * blocks
    together = smaller(heads - first_head, SECTION)
    block = inside // together
    return block, first_head + inside - block * together
