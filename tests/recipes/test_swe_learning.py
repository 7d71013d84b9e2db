"""The benchmark of learning on software tasks: what it does when a way to roll out fails, and how it counts."""

import argparse
import json
import sys
import threading
from pathlib import Path
from typing import Any

import pytest

sys.path.insert(0, str(Path(__file__).parents[2] / "benchmarks"))
import swe_learning
from quickstart.progress import PhaseFailedError
from swe_learning_figures import Drawn, measured, rows_folder
from swe_learning_overrides import environment_of_arm
from swe_learning_start import nearest


def test_the_start_is_found_with_few_looks() -> None:
    shares = {f"step {number}": share for number, share in enumerate([0, 0, 0, 0.01, 0.03, 0.18, 0.5, 0.7, 0.9, 1])}
    chosen, looked = nearest(list(shares), shares.__getitem__, 0.2)
    assert chosen == "step 5"
    assert len(looked) <= 4
    assert nearest(["only"], lambda name: 0.9, 0.2) == ("only", {"only": 0.9})
    with pytest.raises(ValueError, match="--sft-save"):
        nearest([], shares.__getitem__, 0.2)


def test_rows_are_counted_as_they_are_written(tmp_path: Path) -> None:
    row = {"step": 1, "prompt_ids": [1, 2], "response_ids": [3]}
    whole = [json.dumps(row), json.dumps(row), json.dumps({**row, "prompt_ids": [1], "response_ids": [2, 3]})]
    path = tmp_path / "train-0.jsonl"
    path.write_text("\n".join(whole) + "\n" + whole[0][:20])
    drawn = Drawn()
    assert sorted(drawn.rows(tmp_path)[1].values()) == [1, 2]
    with path.open("a") as file:
        file.write(whole[0][20:] + "\n" + json.dumps({**row, "step": 2}) + "\n")
    counted = drawn.rows(tmp_path)
    assert sorted(counted[1].values()) == [1, 3]
    assert counted[2].total() == 1


def arguments_of(folder: Path) -> argparse.Namespace:
    names = {"arms": ["tree", "flat"], "at_once": True, "gpus": ["4", "5"], "seed": 3, "deadline": 1e6, "started": 0.0}
    sizes = {"steps": 1, "tasks": 2, "sessions": 2, "max_tokens": 64, "arms_per_gpu": 1, "device": "gpu"}
    return argparse.Namespace(output=folder, csv=folder / "figures.csv", **names, **sizes)


def test_an_arm_goes_on_to_the_next_way_to_roll_out(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    tried: list[tuple[str, str, str | None]] = []

    def run_arm(arguments: argparse.Namespace, name: str, place: tuple[int, str | None], **options: Any) -> None:
        tried.append((name, options["rollout"], place[1]))
        if name == "tree" and options["rollout"] == "vllm":
            raise PhaseFailedError("no such engine")
        step = {"step": 1, "data": {"tree/session_score/mean": 0.5}}
        (tmp_path / f"{name}.jsonl").write_text(json.dumps(step) + "\n")
        if name == "flat":
            raise PhaseFailedError("ran past its limit")

    monkeypatch.setattr(swe_learning, "run_arm", run_arm)
    monkeypatch.setattr(swe_learning.time, "sleep", lambda seconds: None)
    done = swe_learning.train(arguments_of(tmp_path), "model", ["vllm", "vllm_sleep", "hf"], {"torch": "2"})
    assert not done, "an arm was stopped"
    assert sorted(tried) == [("flat", "vllm", "5"), ("tree", "vllm", "4"), ("tree", "vllm_sleep", "4")]
    table = [line.split(",") for line in (tmp_path / "figures.csv").read_text().splitlines()]
    column = table[0].index("rollout")
    assert [(row[1], row[column]) for row in table[1:]] == [("tree", "vllm_sleep"), ("flat", "vllm")]


def test_arms_that_share_gpus_start_at_once_and_the_last_takes_the_first_place_left(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    arguments, placed = arguments_of(tmp_path), {}
    arguments.arms, arguments.arms_per_gpu = ["tree_float32", "flat_float32", "flat", "flat_again", "tree"], 2
    together, ended = threading.Barrier(4, timeout=20.0), threading.Event()

    def run_arm(arguments: argparse.Namespace, name: str, place: tuple[int, str | None], **options: Any) -> None:
        placed[name] = place
        if name == "tree":
            ended.set()
            return
        together.wait()
        assert name == "flat" or ended.wait(20.0), "the fifth arm waits for no more than one of the four"

    monkeypatch.setattr(swe_learning, "run_arm", run_arm)
    monkeypatch.setattr(swe_learning.time, "sleep", lambda seconds: None)
    assert swe_learning.train(arguments, "model", ["vllm"], {})
    assert sorted(placed[name] for name in arguments.arms[:4]) == [(0, "4"), (1, "5"), (2, "4"), (3, "5")]
    assert placed["tree"] == placed["flat"]


def test_an_arm_alone_on_its_gpu_keeps_to_its_share_of_the_cores(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(swe_learning.os, "sched_getaffinity", lambda process: set(range(2, 8)))
    arguments = arguments_of(tmp_path)
    assert swe_learning.own_cores(arguments, "5") == ["5", "6", "7"]
    arguments.arms_per_gpu = 2
    assert swe_learning.own_cores(arguments, "5") == []


def test_rows_are_compared_within_a_precision(tmp_path: Path) -> None:
    arguments = arguments_of(tmp_path)
    drawn = {
        "tree": {1: [1, 2, 3]},
        "flat": {1: [1, 2, 4], 2: [1]},
        "flat_again": {1: [1, 4, 5]},
        "tree_float32": {1: [6, 7]},
        "flat_float32": {1: [6, 7]},
    }
    arguments.arms = list(drawn)
    for arm, steps in drawn.items():
        folder = rows_folder(arguments, arm, "vllm")
        folder.mkdir()
        rows = [{"step": s, "prompt_ids": [0], "response_ids": [token]} for s in steps for token in steps[s]]
        (folder / "train-0.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
        metrics = [{"step": step, "data": {"tree/session_score/mean": 0.5}} for step in steps]
        (tmp_path / f"{arm}.jsonl").write_text("".join(json.dumps(line) + "\n" for line in metrics))
    lines = measured(arguments, {}, dict.fromkeys(drawn, "vllm"), Drawn())
    same = {(line["arm"], line["step"]): (line["rows_as_in_tree_arm"], line["rows_as_in_flat_arm"]) for line in lines}
    assert same == {
        ("tree", 1): (3, 2),
        ("flat", 1): (2, 3),
        ("flat", 2): ("", 1),
        ("flat_again", 1): (1, 2),
        ("tree_float32", 1): (2, 2),
        ("flat_float32", 1): (2, 2),
    }


def test_float32_arms_attend_in_float32() -> None:
    assert environment_of_arm("tree_float32", "gpu") == {"TRITON_F32_DEFAULT": "ieee"}
    assert environment_of_arm("flat_again", "gpu") == {}
    assert environment_of_arm("flat_float32", "cpu") == {"VERL_ENGINE_DEVICE": "cuda", "TRITON_F32_DEFAULT": "ieee"}
