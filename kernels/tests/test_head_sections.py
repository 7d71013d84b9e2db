"""Every tile is taken once, long blocks first, a section's heads side by side; narrow sections where those balance."""

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from tree_shapes import SHAPES, rows_below, subtree_end_of

from tree_kernels import TreeLayout
from tree_kernels.tree_attention import head_sections
from tree_kernels.tree_attention.head_sections import (
    KEY_BLOCK,
    NARROW,
    PROCESSORS,
    SECTIONS,
    WIDE,
    heads_of_section,
    tile_at,
)


@pytest.mark.parametrize("section", SECTIONS)
@pytest.mark.parametrize("heads", [1, 2, 4, 5, 7, 8, 9, 14, 28, 32, 40])
@pytest.mark.parametrize("blocks", [1, 2, 5, 64])
def test_every_tile_is_taken_once(blocks: int, heads: int, section: int) -> None:
    tiles = [tile_at(place, blocks=blocks, heads=heads, section=section) for place in range(blocks * heads)]
    assert sorted(tiles) == [(block, head) for block in range(blocks) for head in range(heads)]


@pytest.mark.parametrize("section", SECTIONS)
def test_inside_a_section_a_block_comes_before_the_next_one_of_any_head(section: int) -> None:
    blocks, heads = 5, 2 * section + 3
    tiles = [tile_at(place, blocks=blocks, heads=heads, section=section) for place in range(blocks * heads)]
    expected = [
        (block, head)
        for together in (range(section), range(section, 2 * section), range(2 * section, heads))
        for block in range(blocks)
        for head in together
    ]
    assert tiles == expected


def long_forest(shared: int, *sizes: int) -> TreeLayout:
    return TreeLayout.from_subtree_end(subtree_end_of(rows_below(shared, *sizes)))


def idle_share(layout: TreeLayout, section: int) -> float:
    """Share of the processors' time in which they wait for a section's last tile; a tile takes its pairs' time."""
    queries_M = np.concatenate([np.full(layout.past_length, layout.num_tokens), layout.subtree_end_on_host()])
    queries_M[layout.past_length :] -= np.arange(layout.num_tokens)
    free_at = np.zeros(PROCESSORS)
    for start in range(0, len(queries_M), KEY_BLOCK):
        for _ in range(section):
            free_at[free_at.argmin()] += queries_M[start : start + KEY_BLOCK].sum()
    return float(1 - free_at.mean() / free_at.max())


def test_a_long_prompt_with_long_answers_takes_narrow_sections_and_many_short_rows_wide_ones() -> None:
    narrow, wide = long_forest(4096, *[1792] * 16), long_forest(512, *[256] * 64)
    assert heads_of_section(narrow, window=None) == NARROW
    assert heads_of_section(wide, window=None) == WIDE
    assert idle_share(narrow, NARROW) < 0.1 < 0.4 < idle_share(wide, NARROW)


def test_keys_of_the_past_are_seen_by_every_query() -> None:
    subtree_end = subtree_end_of(rows_below(512, *[256] * 64))
    behind_much = TreeLayout.from_subtree_end(subtree_end, past_length=30_000)
    behind_little = TreeLayout.from_subtree_end(subtree_end, past_length=100)
    assert heads_of_section(behind_much, window=None) == NARROW
    assert heads_of_section(behind_little, window=None) == WIDE
    assert idle_share(behind_much, NARROW) < 0.1 < 0.4 < idle_share(behind_little, NARROW)


def test_what_is_not_known_takes_wide_sections() -> None:
    layout = long_forest(4096, *[1792] * 16)
    assert heads_of_section(layout, window=100_000) == WIDE
    on_device = TreeLayout(layout.subtree_end, layout.position, 0)
    assert heads_of_section(on_device, window=None) == WIDE


@given(
    shape=st.sampled_from(sorted(SHAPES)),
    size=st.integers(1, 400),
    past=st.integers(0, 500),
    processors=st.integers(1, 8),
)
def test_narrow_sections_are_those_whose_longest_tile_is_within_a_processors_share(
    shape: str, size: int, past: int, processors: int
) -> None:
    layout = TreeLayout.from_subtree_end(subtree_end_of(SHAPES[shape](size)), past_length=past)
    visible = layout.position.sum(dtype=torch.int64) + (1 + past) * size
    queries = layout.subtree_end - torch.arange(size)
    longest = KEY_BLOCK * max(int(queries.max()), size if past else 0)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(head_sections, "PROCESSORS", processors)
        is_narrow = heads_of_section(layout, window=None) == NARROW
    assert is_narrow == (longest <= NARROW * int(visible) / processors)
