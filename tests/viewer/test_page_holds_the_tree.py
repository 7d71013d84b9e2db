"""The page's data against dictionaries of prefixes that are made from the rows alone."""

import base64
import gzip
import itertools
import json
import random
import re
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from record_files import write

from tree_rl.inspection.row import Row
from tree_rl.inspection.row_file import read_row_file
from tree_rl.viewer.page import view_data, write_page
from tree_rl.viewer.recorded_rows import read_recorded_rows
from tree_rl.viewer.roles import ROLES, RoleReader


def page_of(path: Path, **options: Any) -> dict[str, Any]:
    """What a page carries."""
    rows = read_recorded_rows(path, read_row_file)
    page = write_page(view_data(rows, RoleReader(None), source=path.name, **options))
    found = re.search(rb'<script id="data"[^>]*>([^<]*)</script>', page)
    assert found is not None
    return json.loads(gzip.decompress(base64.b64decode(found[1])))


def branching_records(seed: int, count: int) -> list[dict[str, Any]]:
    """Rows that leave one another at any depth, some equal, some prefixes of others."""
    rng = random.Random(seed)
    rows = [[7] + [rng.randrange(5) for _ in range(20)]]
    while len(rows) < count:
        base = rng.choice(rows)
        rows.append(base[: rng.randrange(1, len(base) + 1)] + [rng.randrange(5) for _ in range(rng.randrange(9))])
    return [{"uid": rng.choice("ab"), "input_ids": row, "loss_mask": [t % 2 for t in row]} for row in rows]


def along(group: dict[str, Any], key: str) -> list[Any]:
    """A track as one value per unique token."""
    track = group["tracks"][key]
    bounds = itertools.pairwise([*track["start"], group["unique"]])
    return [value for value, (a, b) in zip(track["value"], bounds, strict=True) for _ in range(a, b)]


def row_path(group: dict[str, Any], row: int) -> list[int]:
    """Unique tokens of a row, from its last segment to the root."""
    segments, segment, found = group["segments"], group["paths"]["end"][row], []
    while segment >= 0:
        start, length = segments["start"][segment], segments["length"][segment]
        found = [*range(start, start + length), *found]
        segment = segments["parent"][segment]
    return found


def ids_of(group: dict[str, Any]) -> list[int]:
    return np.frombuffer(base64.b64decode(group["ids"]), dtype="<i4").tolist()


@pytest.mark.parametrize("seed", range(6))
def test_every_path_gives_its_rows_ids_no_prefix_stands_twice_and_active_counts_are_those_of_rows_and_prefixes(
    seed: int, tmp_path: Path
) -> None:
    records = branching_records(seed, 40)
    for group in page_of(write(tmp_path / "rows.jsonl", records))["groups"]:
        rows = [record["input_ids"] for record in records if record["uid"] == group["name"]]
        prefixes = {tuple(row[: end + 1]) for row in rows for end in range(len(row))}
        ids, segments = ids_of(group), group["segments"]
        assert (group["unique"], group["flat"]) == (len(prefixes), sum(map(len, rows)))
        assert sum(segments["length"]) == len(ids) == len(prefixes)
        through = {prefix: sum(tuple(row[: len(prefix)]) == prefix for row in rows) for prefix in prefixes}
        paths = along(group, "paths")
        for number, row in enumerate(rows):
            path = row_path(group, number)
            assert [ids[token] for token in path] == row
            assert group["paths"]["tokens"][number] == len(row)
            assert [paths[token] for token in path] == [through[tuple(row[: end + 1])] for end in range(len(row))]
        active, deepest = group["active"], max(map(len, rows))
        steps = itertools.pairwise([*active["at"], deepest])
        told = [pair for pair, (a, b) in zip(zip(active["rows"], active["distinct"], strict=True), steps, strict=False)
                for _ in range(a, b)]  # fmt: skip
        long = [[row for row in rows if len(row) > depth] for depth in range(deepest)]
        assert told == [(len(all_), len({tuple(row[: depth + 1]) for row in all_})) for depth, all_ in enumerate(long)]
        assert (sum(a for a, _ in told), sum(b for _, b in told)) == (group["flat"], group["unique"])


def test_groups_stand_by_overlap_highest_first(tmp_path: Path) -> None:
    records = [{"uid": "low", "input_ids": [n, 1, 2, 3]} for n in range(3)]
    records += [{"uid": "high", "input_ids": [1, 2, 3, n]} for n in range(3)]
    assert [group["name"] for group in page_of(write(tmp_path / "rows.jsonl", records))["groups"]] == ["high", "low"]


def test_values_are_the_means_of_the_rows_that_train_the_token(tmp_path: Path) -> None:
    # Two samples that share the prompt and their first answer token, with all that a trainer knows of them.
    left = {"reward": 1, "advantages": [0.5, 1.5, 9], "rollout_log_probs": [-1, -2, 0], "old_log_probs": [-1.5, -1, 0]}
    left |= {"prompt_ids": [1, 2], "response_ids": [3, 4, 5], "weight_versions": [7, 7, 7], "response_mask": [1, 1, 0]}
    right = {"reward": 0, "advantages": [-0.1, -1, 9], "rollout_log_probs": [-1, -4, 0], "old_log_probs": [-1, -1, 0]}
    right |= {"response_ids": [3, 6, 5], "weight_versions": [8, 8, 8]}
    group = page_of(write(tmp_path / "rows.jsonl", [left, left | right]), max_tokens=3)["groups"][0]
    assert [ids_of(group)[token] for token in row_path(group, 0)] == [1, 2, 3, 4, 5]
    of = {key: [along(group, key)[token] for token in row_path(group, 0)] for key in group["tracks"]}
    assert of["reward"] == [0.5, 0.5, 0.5, 1, 1]
    assert of["advantage"] == pytest.approx([None, None, 0.2, 1.5, None])
    assert of["log_prob_change"] == pytest.approx([None, None, -0.25, 1, None])
    assert of["weight_version"] == [None, None, 8, 7, None]
    assert [ROLES[role] for role in of["role"]] == ["given", "given", "model", "model", "given"]
    sizes = [along(group, "partition").count(part) for part in set(along(group, "partition"))]
    assert max(sizes) <= 3 and sum(sizes) == group["unique"]
    assert group["paths"]["reward"] == [1, 0]
    assert [cause for cause in group["segments"]["cause"] if cause] == ["sampling"]


def test_a_file_without_values_says_what_is_missing(tmp_path: Path) -> None:
    data = page_of(write(tmp_path / "rows.jsonl", [{"input_ids": [1, 2]}]))
    lacking = {one["key"]: one["missing"] for one in data["measures"] if one["key"] not in data["groups"][0]["tracks"]}
    assert sorted(lacking) == ["advantage", "log_prob_change", "partition", "reward", "weight_version"]
    assert all(lacking.values())


def test_padding_takes_its_values_with_it(tmp_path: Path) -> None:
    padded = {"input_ids": [0, 0, 5, 6, 7, 0], "attention_mask": [0, 0, 1, 1, 1, 0], "advantages": [9, 9, 1, 2, 3, 9]}
    group = page_of(write(tmp_path / "rows.jsonl", [padded]))["groups"][0]
    assert (ids_of(group), along(group, "advantage")) == ([5, 6, 7], [1, 2, 3])


def test_a_run_folder_gives_its_tree_dumps_by_step(tmp_path: Path) -> None:
    # The plugin imports verl: only this test pays for it.
    from tree_rl.verl_plugin.agent_loops.tree_dump import FinishedRow, append_tree

    run = tmp_path / "run"
    common: dict[str, Any] = {"uid": "p", "index": 0, "prompt_ids": (1, 2), "response_mask": (1,)}
    for step in (1, 2):
        rows = [
            FinishedRow(**common, step=step, session=one, response_ids=(3 + one,), reward=1.0, weight_version=version)
            for one, version in enumerate((step + 4, step + 5, None))
        ]
        path = append_tree(run / "trees", "train", rows)
    shutil.copy(path, path.with_name("train-step000003-9.replaced"))
    (run / "metrics.jsonl").write_text('{"loss": 1}\n')
    groups = page_of(run)["groups"]
    assert [(group["name"], group["rows"]) for group in groups] == [("train step 1 · p", 3), ("train step 2 · p", 3)]
    for step, group in enumerate(groups, 1):
        versions = [along(group, "weight_version")[row_path(group, row)[-1]] for row in range(3)]
        assert (versions, along(group, "weight_version")[:2]) == ([step + 4, step + 5, None], [None, None])


def test_steps_that_lie_in_a_file_each_are_shown_apart(tmp_path: Path) -> None:
    for step in (1, 2):
        record = {"uid": "p", "step": step, "input_ids": [1, 2, step], "reward": step}
        write(tmp_path / f"{step}.jsonl", [record, record])
    groups = page_of(tmp_path)["groups"]
    assert [(group["name"], group["rows"]) for group in groups] == [("step 1 · p", 2), ("step 2 · p", 2)]
    assert page_of(tmp_path / "*.jsonl")["groups"] == groups


def test_many_values_become_means_that_keep_the_sum(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr("tree_rl.viewer.tracks.MOST_RUNS", 50)
    rng = random.Random(3)
    values = [rng.random() for _ in range(1000)]
    record = {"prompt_ids": [1], "response_ids": list(range(1000)), "advantages": values}
    (group,) = page_of(write(tmp_path / "rows.jsonl", [record]))["groups"]
    told = along(group, "advantage")
    assert len(group["tracks"]["advantage"]["start"]) <= 55
    assert told[0] is None and sum(told[1:]) == pytest.approx(sum(values), rel=1e-3)


def test_roles_follow_the_chat_template(qwen_tokenizer: Path) -> None:
    reader = RoleReader(qwen_tokenizer)
    turns = ["system\nbe kind", "user\nhi", "assistant\nyes", "user\n<tool_response>\n3</tool_response>"]
    text = "".join(f"<|im_start|>{words}<|im_end|>\n" for words in turns)
    ids = reader.tokenizer.encode(text).ids
    told = [ROLES[role] for role, _ in itertools.groupby(reader.roles_of(ids, None).tolist())]
    assert told == ["system", "user", "assistant", "tool"]
    row = Row(name="row 0", group="g", token_ids=ids, trained=np.arange(len(ids)) == len(ids) - 1)
    group = view_data([row], reader, source="s")["groups"][0]
    assert "".join(group["text"]) == text
