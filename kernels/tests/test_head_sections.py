"""Every tile is taken once, long blocks first, and the heads of a section side by side."""

import pytest

from tree_kernels.tree_attention.fa4.head_sections import SECTION, tile_at


@pytest.mark.parametrize("heads", [1, SECTION, SECTION + 1, 2 * SECTION + 3, 40])
@pytest.mark.parametrize("blocks", [1, 5])
def test_inside_a_section_a_block_comes_before_the_next_one_of_any_head(blocks: int, heads: int) -> None:
    sections = [range(first, min(first + SECTION, heads)) for first in range(0, heads, SECTION)]
    expected = [(block, head) for section in sections for block in range(blocks) for head in section]
    assert [tile_at(place, blocks=blocks, heads=heads) for place in range(blocks * heads)] == expected
