"""The page of `tree-rl view` in real headless Chromium: keys, search, folding, themes, widths; 5,000 segments."""

import json
import os
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
from browser import MISSING, Browser, browser

from tree_rl.inspection.row import Row
from tree_rl.viewer.groups import describe_groups
from tree_rl.viewer.page import build_page
from tree_rl.viewer.row_figures import FIGURES

pytestmark = [
    pytest.mark.skipif(bool(MISSING), reason=f"needs {', '.join(MISSING)}"),
    pytest.mark.timeout(240),
]
SHOTS = os.environ.get("VIEWER_SHOTS")
"""Folder for screenshots; without it none is kept."""


@pytest.fixture(scope="module")
def window(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Browser]:
    with browser(tmp_path_factory.mktemp("profile")) as opened:
        yield opened


def page_of(folder: Path, rows: list[list[int]], **figures: list[float]) -> str:
    named = [
        Row(name=f"row {place}", group="a", token_ids=np.array(row), trained=np.arange(len(row)) > 2)
        for place, row in enumerate(rows)
    ]
    known = [{name: values[place] for name, values in figures.items()} for place in range(len(rows))]
    groups = describe_groups(named, known, decode=lambda ids: " ".join(f"word{one}" for one in ids), max_tokens=6)
    file = folder / "page.html"
    file.write_text(build_page({"title": "a page", "text": True, "figures": FIGURES, "groups": groups}))
    return file.as_uri()


@pytest.fixture
def small(tmp_path: Path) -> str:
    """A trunk of three tokens, two branches, one of which branches again: five segments."""
    rows = [[1, 2, 3, 4, 5, 6], [1, 2, 3, 4, 5, 7, 8], [1, 2, 3, 9]]
    return page_of(tmp_path, rows, reward=[0.0, 1.0, 0.5], advantage=[-1.0, 1.0, 0.0])


def test_keys_move_along_the_tree_and_fold_it(window: Browser, small: str) -> None:
    window.open(small)
    state = window.state()
    assert (state["segments"], state["lines"], state["segment"]) == ("5", "3", "-1")
    window.run("document.getElementById('tree').focus()")
    seen = []
    for key in ("ArrowRight", "ArrowRight", "ArrowRight", "ArrowDown", "ArrowLeft", "ArrowLeft"):
        window.press(key)
        seen.append(window.run("return document.querySelector('#details pre').textContent"))
    assert seen == ["word1 word2 word3", "word4 word5", "word7 word8", "word6", "word4 word5", "word1 word2 word3"]
    table = window.run("return [...document.querySelectorAll('#details td')].map((cell) => cell.textContent)")
    assert table == ["row 0", "6", "0", "-1", "row 1", "7", "1", "1", "row 2", "4", "0.500", "0"]
    lines = []
    for key in ("c", "ArrowRight", "Escape"):
        window.press(key)
        lines.append(window.run("return window.linesNow()"))
    assert lines == [1, 3, 3], "folded, unfolded by what is shown below it, and so it stays"
    assert window.state()["segment"] == "-1"


def test_search_finds_text_and_enter_goes_on(window: Browser, small: str) -> None:
    window.open(small)
    window.run("document.getElementById('tree').focus()")
    window.press("/")
    window.press(*"WORD9")
    assert window.state()["found"] == "1"
    window.press("Enter")
    assert window.run("return document.querySelector('#details pre').textContent") == "word9"


def test_each_colour_has_a_legend_and_missing_ones_are_named(window: Browser, small: str) -> None:
    window.open(small)
    options = window.run(
        "return [...document.querySelector('#colour').options].map((one) => [one.value, one.disabled])"
    )
    values = [value for value, off in options if not off]
    assert values == ["paths", "role", "cause", "reward", "advantage", "partition"]
    assert sum(off for _, off in options) == len(FIGURES) - 2
    legends = set()
    for value in values:
        window.run("const c = document.querySelector('#colour'); c.value = arguments[0];"
                   "c.dispatchEvent(new Event('change'))", value)  # fmt: skip
        legends.add(window.run("return document.querySelector('#legend').textContent"))
    assert len(legends) == len(values)
    assert any("reward 0" in text and "reward 1" in text for text in legends)


@pytest.mark.parametrize("theme", ["light", "dark"])
@pytest.mark.parametrize("width", [390, 1280, 2560])
def test_every_width_and_theme_fits(window: Browser, small: str, width: int, theme: str) -> None:
    address = SHOTS and (Path(SHOTS) / "page.html").as_uri()
    colour, height = {390: ("cause", 900), 1280: ("role", 760), 2560: ("partition", 1100)}[width]
    window.open(f"{address or small}#theme={theme}&colour={colour}&segment=1", width=width, height=height)
    overflow, back = window.run(
        "return [document.documentElement.scrollWidth - window.innerWidth,"
        "getComputedStyle(document.documentElement).backgroundColor]"
    )
    # Chromium's window is at least 500 wide without a screen; what matters is that nothing hangs over.
    assert overflow <= 0
    assert (back == "rgb(20, 24, 29)") == (theme == "dark")
    drawn = window.run(
        "const c = document.getElementById('tree'), d = c.getContext('2d').getImageData(0, 0, c.width, c.height).data;"
        "return new Set(Array.from({length: d.length / 4}, (_, i) => d.slice(4 * i, 4 * i + 3).join())).size"
    )
    assert drawn > 4, "the tree is painted"
    if SHOTS:
        window.screenshot(Path(SHOTS) / f"{width}_{theme}.png")


def test_five_thousand_segments_are_painted(window: Browser, tmp_path: Path) -> None:
    draw = np.random.default_rng(0)
    rows: list[list[int]] = [draw.integers(0, 50, 40).tolist()]
    while len(rows) < 3000:
        old = rows[draw.integers(len(rows))]
        kept = int(draw.integers(1, len(old)))
        rows.append(old[:kept] + draw.integers(50, 10_000, int(draw.integers(5, 60))).tolist())
    window.open(page_of(tmp_path, rows))
    assert int(window.state()["segments"]) >= 5000
    times = window.run("return window.frameTimes(20)")
    assert len(times) == 20 and all(time >= 0 for time in times)
    if SHOTS:
        (Path(SHOTS) / "frames.json").write_text(json.dumps(sorted(times)))
