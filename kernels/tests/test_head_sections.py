"""Every tile is taken once, long blocks first, and the heads of a section side by side."""

import pytest

from tree_kernels.tree_attention.fa4.head_sections import SECTION, tile_at


@pytest.mark.parametrize("heads", [1, SECTION, SECTION + 1, 40])
@pytest.mark.parametrize("blocks", [1, 5])
def test_every_tile_is_taken_once(blocks: int, heads: int) -> None:
    tiles = [tile_at(place, blocks=blocks, heads=heads) for place in range(blocks * heads)]
    assert sorted(tiles) == [(block, head) for block in range(blocks) for head in range(heads)]


def test_inside_a_section_a_block_comes_before_the_next_one_of_any_head() -> None:
    blocks, heads = 5, 2 * SECTION + 3
    tiles = [tile_at(place, blocks=blocks, heads=heads) for place in range(blocks * heads)]
    expected = [
        (block, head)
        for section in (range(SECTION), range(SECTION, 2 * SECTION), range(2 * SECTION, heads))
        for block in range(blocks)
        for head in section
    ]
    assert tiles == expected
