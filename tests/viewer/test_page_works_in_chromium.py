"""The page in a real browser: what it draws, what keys, pointer and menus do, and that text stays text."""

import random
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from chromium_page import Page

from tree_rl.inspection.row import Row
from tree_rl.viewer.page import view_data, write_page
from tree_rl.viewer.roles import RoleReader

Open = Callable[..., None]
PROMPT = "</script><script>window.hacked = 1</script><img src=x onerror='window.hacked = 1'>\u202eabc\u2066\x00\x1b[31m"
ANSWERS = ("first answer", "second answer, longer", "third")


@pytest.fixture
def show(browser: Page, tmp_path: Path) -> Open:
    """Opens the page of rows in the browser."""

    def show(rows: list[Row], roles: RoleReader, *, max_tokens: int | None = None, **size: int) -> None:
        path = tmp_path / "page.html"
        path.write_bytes(write_page(view_data(rows, roles, source="</title>rows.jsonl", max_tokens=max_tokens)))
        browser.open(path.as_uri(), **size)

    return show


@pytest.fixture(scope="module")
def roles(qwen_tokenizer: Path) -> RoleReader:
    return RoleReader(qwen_tokenizer)


def written_rows(roles: RoleReader, prompt: str) -> list[Row]:
    """Three answers to one prompt, and another group."""
    assert roles.tokenizer is not None
    rows = []
    for number, words in enumerate(ANSWERS):
        asked = roles.tokenizer.encode(f"<|im_start|>user\n{prompt}<|im_end|>\n<|im_start|>assistant\n").ids
        answer = roles.tokenizer.encode(words + "<|im_end|>").ids
        ids = np.concatenate([asked, answer])
        row = Row(name=f"row {number}", group="<b>one</b>", token_ids=ids, trained=np.arange(len(ids)) >= len(asked))
        rows.append(replace(row, reward=number / 2, advantage=np.where(row.trained, number - 1.0, np.nan)))
    other = Row(name="row 3", group="two", token_ids=np.array([1, 2, 3]), trained=None)
    return [*rows, other]


def test_text_of_rows_stays_text(browser: Page, show: Open, roles: RoleReader) -> None:
    show(written_rows(roles, PROMPT), roles)
    browser.evaluate("viewer.select(0)")
    told = browser.evaluate("document.getElementById('panel').textContent")
    assert "</script><script>window.hacked = 1</script><img src=x" in told
    assert "⟨U+202E⟩abc⟨U+2066⟩⟨U+0000⟩⟨U+001B⟩[31m" in told
    assert "\u202e" not in told and "\x00" not in told
    assert browser.evaluate("window.hacked === undefined && !document.querySelector('img')")
    assert browser.evaluate("document.title") == "</title>rows.jsonl"
    assert browser.evaluate("document.querySelector('#groupList button').textContent").startswith("<b>one</b>")
    (asked,) = browser.happened("Network.requestWillBeSent")
    assert asked["request"]["url"].startswith("file:") and not browser.happened("Runtime.exceptionThrown")


@pytest.mark.slow
def test_a_megabyte_of_text_shows_its_beginning_and_all_on_demand(browser: Page, show: Open, roles: RoleReader) -> None:
    show(written_rows(roles, "word " * 200_000), roles)
    browser.evaluate("viewer.select(0)")
    size = "document.querySelector('#panel pre').textContent.length"
    assert browser.evaluate(size) == 20_000
    browser.evaluate("document.querySelector('#panel .run button').click()")
    assert browser.evaluate(size) > 1_000_000


@pytest.mark.slow
def test_keys_walk_search_zoom_and_collapse(browser: Page, show: Open, roles: RoleReader) -> None:
    show(written_rows(roles, "hello"), roles)
    selected = "viewer.state.selected"
    browser.evaluate("viewer.tree.focus(); viewer.select(-1)")
    browser.press("ArrowRight")
    assert browser.evaluate(selected) == 0
    children = browser.evaluate("viewer.state.layout.children[0]")
    assert len(children) == 3
    for key, expected in [
        *(("ArrowRight", children[0]), ("ArrowDown", children[1]), ("ArrowDown", children[2])),
        *(("ArrowDown", children[2]), ("ArrowUp", children[1]), ("ArrowLeft", 0)),
    ]:
        browser.press(key)
        assert browser.evaluate(selected) == expected
    assert browser.evaluate("document.getElementById('spoken').textContent").startswith("Segment 0: tokens 0 to ")
    browser.press(" ")
    assert browser.evaluate("[...viewer.state.layout.hidden].join('')") == "0111"
    browser.press("/")
    assert browser.evaluate("document.activeElement.id") == "search"
    for sign in "second":
        browser.press(sign)
    assert browser.evaluate("document.getElementById('found').textContent") == "1 found"
    browser.press("Enter")
    assert "second answer, longer" in browser.evaluate("document.getElementById('panel').textContent")
    assert browser.evaluate("[...viewer.state.layout.hidden].join('')") == "0000"
    browser.press("Escape")
    assert browser.evaluate("document.activeElement.id") == "tree"
    browser.press("Enter")
    assert browser.evaluate("viewer.zoomed === viewer.state.selected && viewer.base.y1 - viewer.base.y0") == 1
    browser.press("Escape")
    assert browser.evaluate("[viewer.zoomed, viewer.base.y1 - viewer.base.y0].join()") == "-1,3"
    browser.press("Escape")
    assert browser.evaluate(selected) == -1


@pytest.mark.slow
def test_a_click_shows_text_rows_and_rewards_of_the_box_below_it(browser: Page, show: Open, roles: RoleReader) -> None:
    show(written_rows(roles, "hello"), roles)
    for lane in range(3):
        place = browser.evaluate(
            f"""(() => {{
                const box = viewer.tree.getBoundingClientRect(), {{ layout }} = viewer.state;
                const leaf = layout.children[0].find((s) => layout.top[s] === {lane});
                const depth = layout.group.segments.depth[leaf] + 0.5;
                return [box.left + (depth / layout.group.depth) * box.width,
                    box.top + AXIS + (({lane} + 0.5) / 3) * (box.height - AXIS), layout.rowsThrough(leaf)[0]];
            }})()"""
        )
        browser.click(*place[:2])
        told = browser.evaluate("document.getElementById('panel').textContent")
        assert ANSWERS[place[2]] in told
        cells = "[...document.querySelectorAll('#panel tbody td')].map((cell) => cell.textContent)"
        assert browser.evaluate(cells)[:2] == [f"row {place[2]}", str(place[2] / 2).removesuffix(".0")]
    browser.evaluate("document.querySelector('#panel tbody button').click()")
    assert browser.evaluate("viewer.state.onPath.size") == 2


@pytest.mark.slow
def test_menus_colour_and_change_the_group(browser: Page, show: Open, roles: RoleReader) -> None:
    show(written_rows(roles, "hello"), roles, max_tokens=8)
    options = "[...document.querySelectorAll('#measure option')].map((one) => [one.value, one.disabled])"
    enabled = [key for key, missing in browser.evaluate(options) if not missing]
    assert enabled == ["role", "reward", "advantage", "partition", "paths"]
    assert "Weight version: no column" in browser.evaluate("document.getElementById('missing').textContent")
    pixels = "viewer.drawNow(), viewer.tree.toDataURL()"
    pictures = []
    for key in enabled:
        browser.evaluate(f"byId('measure').value = '{key}', byId('measure').onchange()")
        pictures.append(browser.evaluate(pixels))
        assert browser.evaluate("document.querySelectorAll('#legend i').length") >= 1
    browser.evaluate("document.getElementById('theme').click()")
    pictures.append(browser.evaluate(pixels))
    assert len(set(pictures)) == len(pictures)
    browser.evaluate("document.querySelectorAll('#groupList button')[1].click()")
    assert browser.evaluate("viewer.state.layout.group.name + viewer.state.measure") == "twopaths"


@pytest.mark.slow
def test_colours_on_the_canvas_are_those_of_the_legend(browser: Page, show: Open, roles: RoleReader) -> None:
    show(written_rows(roles, "hello"), roles)
    told: dict[str, Any] = browser.evaluate(
        """(() => {
            viewer.drawNow();
            const { layout } = viewer.state, { tracks, segments, depth } = layout.group, found = [];
            const context = viewer.tree.getContext("2d"), { width, height } = viewer.tree;
            for (let s = 0; s < layout.size; s++) layout.eachRun("role", s, (offset, length, run) => {
                if ((length / depth) * width < 6) return;
                const x = ((segments.depth[s] + offset + length / 2) / depth) * width;
                const y = AXIS + ((layout.top[s] + 0.2 * layout.lanes[s]) / layout.totalLanes) * (height - AXIS);
                const [r, g, b] = context.getImageData(Math.floor(x), Math.floor(y), 1, 1).data;
                found.push([d3.rgb(r, g, b).formatHex(), ROLE_COLOURS[viewer.data.roles[tracks.role.value[run]]]]);
            });
            return found;
        })()"""
    )
    assert len(told) >= 5
    assert all(drawn == meant for drawn, meant in told)


@pytest.mark.slow
def test_a_long_run_keeps_its_colour_behind_runs_below_a_pixel(browser: Page, show: Open) -> None:
    trained = np.arange(9_000) % 4_500 >= 2
    row = Row(name="row 0", group="g", token_ids=np.arange(9_000), trained=trained)
    show([row], RoleReader(None))
    told = browser.evaluate(
        """(() => {
            viewer.drawNow();
            const { width, height } = viewer.tree, context = viewer.tree.getContext("2d");
            return [0.05, 0.3, 0.55, 0.95].map((share) => {
                const [r, g, b] = context.getImageData(Math.floor(share * width), height / 2, 1, 1).data;
                return d3.rgb(r, g, b).formatHex();
            });
        })()"""
    )
    assert told == [browser.evaluate("ROLE_COLOURS.model")] * 4


@pytest.mark.slow
@pytest.mark.parametrize("width", [390, 1280, 2560])
def test_nothing_stands_wider_than_the_screen(browser: Page, show: Open, roles: RoleReader, width: int) -> None:
    show(written_rows(roles, "hello " * 400), roles, width=width, height=800)
    browser.evaluate("viewer.select(0)")
    assert browser.evaluate("document.documentElement.scrollWidth") <= width
    assert browser.evaluate("viewer.tree.getBoundingClientRect().width") >= width / 3
    named = "[...document.querySelectorAll('button, select, input, canvas')]"
    assert browser.evaluate(f"{named}.every((one) => one.ariaLabel || one.labels?.length || one.textContent.trim())")


def many_rows() -> list[Row]:
    """4,000 rows that leave one another at any depth: more than 5,000 segments, with values at every token."""
    rng = random.Random(0)
    rows = [[rng.randrange(99) for _ in range(300)]]
    while len(rows) < 4_000:
        base = rng.choice(rows) if rng.random() < 0.6 else rows[0]
        rows.append(base[: rng.randrange(50, len(base) + 1)] + [rng.randrange(99) for _ in range(rng.randrange(9, 99))])
    made, noise = [], np.random.default_rng(0)
    for row in map(np.array, rows):
        values = {"advantage": np.full(len(row), rng.random() - 0.5), "log_prob_change": noise.random(len(row)) - 0.5}
        made.append(Row(name=f"row {len(made)}", group="g", token_ids=row, trained=None, **values))
    return made


@pytest.mark.slow
def test_five_thousand_segments_are_all_found(browser: Page, show: Open) -> None:
    show(many_rows(), RoleReader(None))
    assert browser.evaluate("viewer.state.layout.size") >= 5_000
    browser.evaluate("viewer.colourBy('paths'), viewer.drawNow()")
    assert browser.evaluate(
        """(() => {
            const { layout } = viewer.state, { segments } = layout.group;
            const middle = (s) => layout.at(segments.depth[s] + segments.length[s] / 2, layout.top[s] + 0.5);
            return segments.depth.every((_, s) => middle(s) === s);
        })()"""
    )
    assert not browser.happened("Runtime.exceptionThrown")


@pytest.mark.slow
def test_a_slider_shows_the_groups_of_one_step_with_their_tasks(browser: Page, show: Open, roles: RoleReader) -> None:
    written = [replace(one, group="train step 3 · a") for one in written_rows(roles, "Mend it")[:2]]
    later = [replace(one, group="train step 5 · b") for one in written_rows(roles, "Test it")[:2]]
    show([*written, *later], roles, width=390)
    listed = "[...document.querySelectorAll('#groupList button')].map((one) => one.textContent)"
    assert len(browser.evaluate(listed)) == 2
    for at, step, task in ((1, "3", "Mend it"), (2, "5", "Test it")):
        browser.evaluate(f"byId('step').value = {at}; byId('step').dispatchEvent(new Event('input'))")
        (only,) = browser.evaluate(listed)
        assert task in only and browser.evaluate("byId('stepName').textContent") == step
    browser.evaluate("byId('step').value = 0; byId('step').dispatchEvent(new Event('input'))")
    assert len(browser.evaluate(listed)) == 2
    assert browser.evaluate("document.documentElement.scrollWidth <= innerWidth")
    show(written, roles)
    assert browser.evaluate("byId('stepper').hidden")
