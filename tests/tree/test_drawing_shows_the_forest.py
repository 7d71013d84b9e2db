"""Drawings: each segment once, the rest counted, input text escaped, deep forests without recursion."""

import itertools
import re
from xml.etree import ElementTree

import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from tree_rl.tree import Forest, draw_svg, draw_text
from tree_rl.tree.report.heaviest_part import choose_shown

ROWS = st.lists(st.lists(st.integers(0, 2), min_size=1, max_size=7), max_size=9)
SVG = "{http://www.w3.org/2000/svg}"


def test_text_of_a_small_forest_has_a_label_of_one_line_for_each_segment():
    forest = Forest.from_rows([[1, 2, 3, 4], [1, 2, 5], [1, 2], [1, 2, 3, 4], [9]])
    labels = {9: "a\nb\tc\x00" + "x" * 90}
    drawn = draw_text(forest, decode=lambda ids: " ".join(labels.get(one, str(one)) for one in ids), label_width=12)
    assert drawn.splitlines() == [
        "5 rows, 2 trees, 6 unique of 14 flat tokens, POR 0.571, token bound 2.33x",
        "2 x4 end 1 “1 2”",
        "├─ 2 x2 “3 4”",
        "└─ 1 x1 “5”",
        "1 x1 “a⏎b⇥c�xxxxx…”",
    ]


def test_one_of_a_kind_has_no_plural():
    svg = draw_svg(Forest.from_rows([[1, 2, 3], [1, 2, 4, 5], [1, 2], [8]]), max_segments=2)
    assert "2 tokens at positions 0 to 1, 3 rows; 1 branch, 1 token not drawn<" in svg
    assert ">end of 1 row<" in svg and "+1 tree not drawn" in svg
    assert "1 token at position 0, 1 row<" in draw_svg(Forest.from_rows([[8]]))
    assert draw_text(Forest.from_rows([[1], [2]]), max_segments=1).endswith("\n… 1 more tree")


@given(rows=ROWS, limit=st.integers(1, 12), level=st.integers(0, 4))
@settings(max_examples=60, deadline=None)
def test_what_is_hidden_is_counted(rows, limit, level):
    forest = Forest.from_rows(rows)
    shown = choose_shown(forest, max_segments=limit, max_level=level)
    chosen = set(shown.segments.tolist())
    assert len(chosen) <= limit
    assert all(forest.segments.parent[segment] in chosen | {-1} for segment in chosen)
    lengths = forest.segments.lengths
    hidden_roots = [s for s in range(forest.num_segments) if forest.segments.parent[s] < 0 and s not in chosen]
    assert shown.hidden_roots == len(hidden_roots)
    hidden_trees = sum(int(forest.segments.subtree_end[s] - forest.segments.start[s]) for s in hidden_roots)
    drawn = sum(int(lengths[segment]) for segment in chosen)
    below = int(shown.hidden_tokens[list(chosen)].sum()) if chosen else 0
    assert drawn + below + hidden_trees == forest.num_unique
    lines = draw_text(forest, max_segments=limit, max_level=level).splitlines()
    with_hidden = sum(bool(shown.hidden_branches[segment]) for segment in chosen)
    assert len(lines) == 1 + len(chosen) + with_hidden + bool(hidden_roots)


def assert_inside_and_apart(shown, width):
    """What stands at one height: (y, left, right) each."""
    for _, line in itertools.groupby(sorted(shown), key=lambda one: one[0]):
        edges = [edge for _, left, right in line for edge in (left, right)]
        assert edges == sorted(edges) and edges[0] >= 0 and edges[-1] <= width


DRAW = np.random.default_rng(3)
PREFIX = DRAW.integers(0, 9, 40).tolist()
BUSHY = [PREFIX[: DRAW.integers(1, 40)] + DRAW.integers(0, 9, DRAW.integers(1, 60)).tolist() for _ in range(25)]


@given(rows=ROWS)
@example(rows=BUSHY)
@settings(max_examples=40, deadline=None)
def test_svg_has_one_bar_per_segment_and_bars_do_not_overlap(rows):
    forest = Forest.from_rows(rows)
    root = ElementTree.fromstring(draw_svg(forest, width=4000))
    bars = [(bar, re.match(r"(\d+) tokens? at", bar.findtext(f"{SVG}title") or "")) for bar in root.iter(f"{SVG}rect")]
    assert sorted(int(found[1]) for _, found in bars if found) == sorted(forest.segments.lengths.tolist())
    titled = [bar for bar, _ in bars if bar.find(f"{SVG}title") is not None]
    shown = [[float(bar.attrib[name]) for name in ("y", "x", "width")] for bar in titled]
    assert_inside_and_apart([(y, x, x + width) for y, x, width in shown], 4000)


def test_a_drawing_as_wide_as_a_phone_keeps_its_text_inside_and_apart():
    forest = Forest.from_rows([[0] * 20_000 + [row] * 30_000 for row in range(1, 17)])
    shown = []
    for note in ElementTree.fromstring(draw_svg(forest, width=390, title="Group attempts")).iter(f"{SVG}text"):
        x, width = float(note.attrib["x"]), 0.55 * float(note.attrib["font-size"]) * len(note.text or "")
        left = x - width * {"start": 0, "middle": 0.5, "end": 1}[note.attrib["text-anchor"]]
        shown.append((float(note.attrib["y"]), left, left + width))
    assert_inside_and_apart(shown, 390)


def test_svg_escapes_its_title_and_needs_nothing_else():
    svg = draw_svg(Forest.from_rows([[1, 2]]), title="<script>alert(1)</script> & more")
    ElementTree.fromstring(svg)
    assert "<script" not in svg and "href" not in svg


def test_a_deep_comb_is_drawn_up_to_the_limits():
    forest = Forest.from_rows([[0] * k + [1] for k in range(1, 1_500)])
    assert len(draw_text(forest, max_segments=50).splitlines()) < 110
    assert draw_svg(forest, max_segments=100).count("token at position ") == 100


def test_an_empty_forest_is_drawn_and_limits_below_one_are_refused():
    assert draw_text(Forest.from_rows([])) == "empty forest"
    with pytest.raises(ValueError, match="max_segments"):
        draw_text(Forest.from_rows([[1]]), max_segments=0)
    with pytest.raises(ValueError, match="width"):
        draw_svg(Forest.from_rows([[1]]), width=10)
