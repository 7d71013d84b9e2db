"""The benchmark of learning on software tasks: where its arms run, and how it counts."""

import argparse
import json
import sys
import threading
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hydra import compose, initialize_config_dir
from omegaconf import DictConfig, OmegaConf

from tree_rl.credit import estimator_named
from tree_rl.verl_plugin.agent_loops.agent_loop_options import read_branching
from tree_rl.verl_plugin.agent_loops.tool_agent_loop import as_gateway_agent
from tree_rl.verl_plugin.trainer.estimator_names import verls_estimator

sys.path.insert(0, str(Path(__file__).parents[2] / "benchmarks"))
import learning_seeds
import learning_seeds_figures
import swe_learning
from quickstart.progress import PhaseFailedError
from swe_learning_figures import Drawn, measured
from swe_learning_overrides import ARMS, CREDIT, HALVED, first_sessions, rows_folder
from swe_learning_overrides import overrides_of as swe_overrides

RECIPES = Path(__file__).parents[2] / "recipes"


def arguments_of(folder: Path, *arms: str, per_gpu: int = 1) -> argparse.Namespace:
    names = {"at_once": True, "gpus": ["4", "5"], "seeds": [3], "deadline": 1e6, "started": 0.0, "rollout": "vllm"}
    sizes = {"arms": list(arms), "arms_per_gpu": per_gpu, "device": "gpu", "sessions": 2, "steps": 2}
    return argparse.Namespace(output=folder, csv=folder / "figures.csv", **names, **sizes)


def composed(recipe: str, config: str, overrides: Sequence[str]) -> DictConfig:
    with initialize_config_dir(str(RECIPES / recipe), version_base=None):
        return compose(config, overrides=list(overrides))


def check_credit(config: DictConfig, arm: str) -> None:
    """The estimator knows its options, and the policy its own; only arms that branch have one."""
    estimator = estimator_named(verls_estimator(config.algorithm.adv_estimator))
    if estimator is not None:
        estimator.check_options(config.algorithm.get("credit") or {})
    options = read_branching(config.actor_rollout_ref.rollout.custom.gateway_agent.get("branching"))
    assert (options is not None) == (arm in HALVED and arm != "half")
    assert (first_sessions(arm, 8) < 8) == (arm in HALVED)


@pytest.mark.parametrize("arm", ARMS)
def test_arms_of_software_tasks_compose(tmp_path: Path, arm: str) -> None:
    arguments = arguments_of(tmp_path, arm)
    rest = {"agent_workers": 4, "session_seconds": 90.0, "sandbox": {}, "override": []}
    arguments = argparse.Namespace(**vars(arguments), **rest)
    config = composed("swe_grpo", "swe_grpo", swe_overrides(arguments, arm, 7))
    check_credit(config, arm)
    assert config.data.seed == config.actor_rollout_ref.rollout.custom.gateway_agent.seed == 7


@pytest.fixture(scope="module")
def quickstart_agent() -> dict[str, Any]:
    """The agent of grpo.yaml."""
    rollout = composed("quickstart", "grpo", []).actor_rollout_ref.rollout
    return as_gateway_agent(OmegaConf.to_container(rollout.custom.tree_agent))


@pytest.mark.parametrize("arm", CREDIT)
def test_arms_of_the_quickstarts_task_compose(tmp_path: Path, arm: str, quickstart_agent: dict[str, Any]) -> None:
    arguments = argparse.Namespace(output=tmp_path, steps=3, prompts=4, sessions=8)
    overrides = learning_seeds.overrides_of(arguments, arm, 7, tmp_path)
    config = composed("quickstart", "grpo", overrides)
    check_credit(config, arm)
    mine = OmegaConf.to_container(config.actor_rollout_ref.rollout.custom.gateway_agent)
    assert {key: mine[key] for key in quickstart_agent} == quickstart_agent


def test_arms_share_gpus_and_one_that_fails_ends_no_other(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    arguments = arguments_of(tmp_path, "gigpo", "tree", "flat", "flat_again", "longest", "tree_float32", per_gpu=2)
    (tmp_path / "gigpo_3.jsonl").write_text(json.dumps({"step": 2, "data": {}}) + "\n")
    placed: dict[str, tuple[int, str | None]] = {}
    together, ended = threading.Barrier(4, timeout=20.0), threading.Event()

    def run_arm(arguments: argparse.Namespace, name: str, seed: int, place: tuple[int, str | None], model: str) -> None:
        placed[name] = place
        if name == "tree_float32":
            ended.set()
            return
        together.wait()
        if name == "flat":
            raise PhaseFailedError("ran past its limit")
        assert ended.wait(20.0), "the fifth arm waits for no more than one of the four"

    monkeypatch.setattr(swe_learning, "run_arm", run_arm)
    monkeypatch.setattr(swe_learning.time, "sleep", lambda seconds: None)
    assert not swe_learning.train(arguments, "model", {}), "an arm failed"
    assert sorted(placed[name] for name in arguments.arms[1:5]) == [(0, "4"), (1, "5"), (2, "4"), (3, "5")]
    assert placed["tree_float32"] == placed["flat"]
    assert "gigpo" not in placed, "it has all its steps"


def test_rows_are_counted_as_they_are_written_and_compared_within_a_precision(tmp_path: Path) -> None:
    drawn = {"tree": {1: [1, 2, 3]}, "flat": {1: [1, 2, 4], 2: [1]}, "flat_again": {1: [1, 4, 5]}}
    drawn |= {arm: {1: [6, 7]} for arm in ("tree_float32", "flat_float32")}
    arguments = arguments_of(tmp_path, *drawn)
    for arm, steps in drawn.items():
        rows_folder(arguments, arm, 3).mkdir()
        rows = [
            {"step": s, "uid": "u", "session": n, "reward": n, "prompt_ids": [0], "response_ids": [token]}
            for s in steps
            for n, token in enumerate(steps[s])
        ]
        lines = "".join(json.dumps(row) + "\n" for row in rows)
        (rows_folder(arguments, arm, 3) / "train-0.jsonl").write_text(lines)
        metrics = [{"step": step, "data": {"tree/session_score/mean": 0.5}} for step in steps]
        (tmp_path / f"{arm}_3.jsonl").write_text("".join(json.dumps(line) + "\n" for line in metrics))
    counter = Drawn()
    file = rows_folder(arguments, "tree", 3) / "train-0.jsonl"
    whole = file.read_text()
    file.write_text(whole[:-20])
    assert counter.rows(file.parent)[1].total() == 2, "a row that is still being written waits"
    file.write_text(whole)
    lines_of_csv = measured(arguments, {}, counter)
    assert lines_of_csv[0]["reward"] == "0.5", "the third session is a branch"
    same = [
        [line[name] for name in ("arm", "step", "rows_as_in_tree_arm", "rows_as_in_flat_arm")] for line in lines_of_csv
    ]
    assert sorted(same, key=str) == [
        *(["flat", 1, 2, 3], ["flat", 2, "", 1], ["flat_again", 1, 1, 2], ["flat_float32", 1, 2, 2]),
        *(["tree", 1, 3, 2], ["tree_float32", 1, 2, 2]),
    ]


def test_an_interval_over_seeds_is_students_t_and_more_seeds_than_it_knows_are_refused() -> None:
    # By hand: of 1, 2 and 6 the deviation is sqrt(7), and t with two degrees of freedom is 4.303.
    assert learning_seeds_figures.half_width(np.array([1.0, 2.0, 6.0])) == pytest.approx(4.303 * (7 / 3) ** 0.5)
    assert np.isnan(learning_seeds_figures.half_width(np.zeros(1)))
    with pytest.raises(ValueError, match="11 seeds: expected at most 10"):
        learning_seeds_figures.half_width(np.zeros(11))
