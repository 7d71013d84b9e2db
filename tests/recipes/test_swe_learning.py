"""The benchmark of learning on software tasks: what it does when a way to roll out fails, and how it counts."""

import argparse
import json
import sys
from pathlib import Path
from typing import Any

import pytest

sys.path.insert(0, str(Path(__file__).parents[2] / "benchmarks"))
import swe_learning
from quickstart.progress import PhaseFailedError
from swe_learning_figures import Drawn
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
    sizes = {"steps": 1, "tasks": 2, "sessions": 2, "max_tokens": 64}
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
