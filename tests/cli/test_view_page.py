"""`tree-rl view`: the page's data against the rows themselves, hostile texts, the server, mistakes."""

import json
import re
import threading
from collections import Counter
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from typer.testing import CliRunner

from tree_rl.cli import app
from tree_rl.inspection.row import Row
from tree_rl.viewer.groups import describe_groups
from tree_rl.viewer.page import build_page
from tree_rl.viewer.row_figures import read_figures
from tree_rl.viewer.server import serve_page


def view(*arguments: object) -> tuple[int, str]:
    done = CliRunner().invoke(app, ["view", *map(str, arguments)])
    return done.exit_code, done.output


def data_of(page: str) -> dict[str, Any]:
    (text,) = re.findall(r'<script type="application/json" id="data">(.*?)</script>', page, re.DOTALL)
    return dict(json.loads(text))


token_rows = st.lists(st.lists(st.integers(0, 3), min_size=1, max_size=12), min_size=1, max_size=10)


@given(token_rows, st.data(), st.sampled_from([None, 3, 1000]))
def test_paths_spell_the_rows_and_every_token_stands_once(
    ids: list[list[int]], data: st.DataObject, max_tokens: int | None
) -> None:
    masks = [data.draw(st.lists(st.booleans(), min_size=len(row), max_size=len(row))) for row in ids]
    rows = [
        Row(name=f"row {place}", group="a", token_ids=np.array(row), trained=np.array(mask))
        for place, (row, mask) in enumerate(zip(ids, masks, strict=True))
    ]
    (group,) = describe_groups(rows, [{"reward": float(len(row))} for row in ids], decode=None, max_tokens=max_tokens)
    segments = group["segments"]
    prefixes = {tuple(row[:end]) for row in ids for end in range(1, len(row) + 1)}
    assert group["unique"] == sum(segments["length"]) == len(prefixes)
    assert group["flat"] == sum(map(len, ids)) and group["por"] == pytest.approx(1 - len(prefixes) / group["flat"])
    marked = {
        tuple(row[: end + 1]) for row, mask in zip(ids, masks, strict=True) for end in range(len(row)) if mask[end]
    }
    for place, row in enumerate(ids):
        path, one = [], group["rows"]["leaf"][place]
        while one >= 0:
            path.insert(0, one)
            one = segments["parent"][one]
        spelt = [int(token) for one in path for token in segments["text"][one].split()]
        assert spelt == row == spelt[: group["rows"]["tokens"][place]]
        depth = 0
        for one in path:
            assert segments["depth"][one] == depth
            roles = [turn % 2 == 1 for turn, run in enumerate(segments["roles"][one]) for _ in range(run)]
            assert roles == [tuple(row[: at + 1]) in marked for at in range(depth, depth + segments["length"][one])]
            depth += segments["length"][one]
            assert segments["paths"][one] == sum(other[:depth] == row[:depth] for other in ids)
    assert group["rows"]["figures"] == {"reward": [float(len(row)) for row in ids]}
    assert (segments["partition"] is None) == (max_tokens is None)
    # A segment beyond the budget is cut inside; it shows where it begins.
    if max_tokens == 3 and max(segments["length"]) <= 3:
        sizes = Counter[int]()
        for part, length in zip(segments["partition"], segments["length"], strict=True):
            sizes[part] += length
        assert max(sizes.values()) <= 3


HOSTILE = ["</script><script>alert(1)</script>", "\u202egnp.exe", "a\x00b\x1b[31m", "<!--", "\u2028]]>", "🌳" * 3]


class Tags(HTMLParser):
    """Tags of a page, and what they load."""

    def __init__(self) -> None:
        super().__init__()
        self.tags: list[str] = []
        self.loads: list[str] = []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append(tag)
        self.loads += [value or "" for name, value in attrs if name in ("src", "href", "srcset", "data", "action")]


def test_a_page_loads_nothing_and_a_text_cannot_leave_its_place() -> None:
    rows = [Row(name="row 0", group="".join(HOSTILE), token_ids=np.arange(6), trained=None)]
    groups = describe_groups(rows, [{}], decode=lambda ids: "".join(HOSTILE), max_tokens=None)
    plain = Tags()
    plain.feed(build_page({"title": "t", "text": True, "figures": {}, "groups": []}))
    page = build_page({"title": HOSTILE[0], "text": True, "figures": {}, "groups": groups})
    tags = Tags()
    tags.feed(page)
    assert tags.tags == plain.tags and tags.tags.count("script") == 3
    assert tags.loads == ["data:,"] and not re.search(r"(?:src|href)=[\"']?https?:|@import|url\(", page)
    assert data_of(page)["groups"][0]["segments"]["text"] == ["".join(HOSTILE)]


def test_figures_come_from_the_columns_of_each_file(tmp_path: Path) -> None:
    folder = tmp_path / "trees"
    folder.mkdir()
    first = {"uid": "a", "input_ids": [1, 2, 3], "reward": 1.0, "advantages": [0.5, 1.5], "step": 4}
    second = {"uid": "a", "input_ids": [1, 2, 4], "reward": None, "advantages": [-1, -1], "step": 4}
    probs = {"old_log_probs": [-1.0, -2.0], "rollout_log_probs": [-1.5, -2.5]}
    (folder / "train-step000001-1.jsonl").write_text("\n".join(map(json.dumps, [first, second])) + "\n")
    (folder / "train-step000002-1.jsonl").write_text(json.dumps({**first, "reward": -2, **probs}) + "\n")
    code, output = view(tmp_path, "--html", tmp_path / "page.html")
    assert code == 0, output
    (group,) = data_of((tmp_path / "page.html").read_text())["groups"]
    assert group["rows"]["figures"] == {
        "reward": [1.0, None, -2.0],
        "advantage": [1.0, -1.0, 1.0],
        "log_prob_change": [None, None, 0.5],
        "version": [4.0, 4.0, 4.0],
    }


def test_strange_columns_give_no_figure(tmp_path: Path) -> None:
    rows = [{"input_ids": [1], "reward": value} for value in ("good", [], float("inf"), {"a": 1}, [[1], [3]])]
    file = tmp_path / "rows.jsonl"
    file.write_text("\n".join(json.dumps(row) for row in rows).replace("Infinity", "1e999") + "\n")
    named = [Row(name=f"row {place}", group="a", token_ids=np.array([1]), trained=None) for place in range(5)]
    assert [one.get("reward") for one in read_figures(file, named)] == [None, None, None, None, 2.0]


def test_only_this_machine_reads_the_page() -> None:
    with serve_page(b"<html>", 0) as server:
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        try:
            address = f"http://127.0.0.1:{server.server_port}"
            assert server.server_address[0] == "127.0.0.1"
            page = httpx.get(address + "/")
            assert page.text == "<html>" and "default-src 'none'" in page.headers["content-security-policy"]
            assert httpx.get(address + "/etc/passwd").status_code == 404
            assert httpx.get(address + "/", headers={"Host": "evil.example"}).status_code == 403
        finally:
            server.shutdown()
            thread.join()


def test_mistakes_end_in_one_line(tmp_path: Path, tree_rl: Any) -> None:
    file = tmp_path / "rows.jsonl"
    file.write_text('{"input_ids": [1, 2]}\n')
    for given_, said in (
        ((tmp_path / "none.jsonl",), "none.jsonl"),
        ((file, "--port", "70000"), "--port"),
        ((file, "--html", tmp_path), tmp_path.name),
        ((file, "--max-tokens", "0"), "--max-tokens"),
    ):
        code, _, err = tree_rl("view", *given_)
        assert (code, err.count("\n")) == (2, 1) and said in err
