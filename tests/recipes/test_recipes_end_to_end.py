"""The recipes with agents as a user runs them, cut short: main_ppo, Ray, gateway, sandboxes, tests and screenshots."""

import re
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

import pytest
from finished_run import run

from tree_rl.inspection.files.run_log import read_run
from tree_rl.rollout.agents.in_environment import SCORED

RECIPES = Path(__file__).parents[2] / "recipes"
SESSIONS = 6
pytestmark = [pytest.mark.ray, pytest.mark.slow, pytest.mark.timeout(900)]


def two_steps(printed: str, folder: Path) -> Sequence[Mapping[str, float]]:
    """The metrics that a run printed, and what holds in every step of each recipe."""
    (folder / "console.txt").write_text(printed)
    steps = read_run(folder / "console.txt").metrics
    assert len(steps) == 2
    for figures in steps:
        assert figures["tree/por"] > 0.3, "sessions of a prompt share it"
        assert figures["tree/self_check_error"] < 1e-4
        assert figures["training/rollout_probs_diff_max"] < 1e-4
        assert figures["actor/grad_norm"] > 0
    return steps


def train(
    recipe: str, output: Path, sandboxes: Path, *overrides: str, sessions: int = SESSIONS, **variables: str
) -> Sequence[Mapping[str, float]]:
    """Two steps of a recipe with a tiny random model; the metrics of each."""
    small = {"STEPS": "2", "TRAIN_TASKS": "4", "TRAIN_BATCH_SIZE": "2", "MINI_BATCH_SIZE": "2", "ROLLOUT_N": "3"}
    small |= {"MAX_TURNS": "2", "TURN_LENGTH": "48", "OMP_NUM_THREADS": "1", "TMPDIR": str(sandboxes)}
    # The random model repairs nothing: without the entropy bonus its gradient would be zero.
    script = RECIPES / recipe / "run_qwen3_fsdp2.sh"
    command = ["bash", script, "actor_rollout_ref.actor.entropy_coeff=0.01", *overrides]
    printed = run(command, output, **{"OUTPUT": str(output / "out"), **small, **variables})
    assert not list(sandboxes.glob("tree-rl-*")), "every sandbox is thrown away"
    assert re.search(r"attention: \w+", printed), "a run says which tree attention it takes"
    steps = two_steps(printed, output)
    for figures in steps:
        assert figures["tree/sessions"] == sessions
        assert figures["tree/session_score/max"] == 0.0
        ends = {name: value for name, value in figures.items() if name.startswith("tree/session/ended_")}
        assert ends.keys() == {f"tree/session/ended_{status}" for status in SCORED}
        assert abs(sum(ends.values()) - 1) < 1e-6, "every session ended once"
        assert figures["tree/session/drift_branches"] == 0
    return steps


def test_swe_grpo_trains_on_what_agents_did_in_sandboxes(tmp_path: Path, open_folder: Path) -> None:
    steps = train("swe_grpo", tmp_path, open_folder, ESTIMATOR="tree_loo", TEST_FREQ="2", SAVE_FREQ="2")
    assert ["val-aux/num_turns/mean" in figures for figures in steps] == [False, True]
    assert (tmp_path / "out" / "checkpoints" / "global_step_2" / "actor" / "huggingface" / "config.json").is_file()


def test_swe_grpo_trains_on_sessions_that_branch(tmp_path: Path, open_folder: Path) -> None:
    branching = "++actor_rollout_ref.rollout.custom.gateway_agent.branching={policy:turns,options:{expansions:1}}"
    for figures in train("swe_grpo", tmp_path, open_folder, branching, sessions=2 * SESSIONS, ESTIMATOR="tree_loo"):
        assert figures["tree/branches_per_session"] == 1.0
        assert figures["rollout/generated_tokens"] > 2 * SESSIONS
        assert figures["rollout/replayed_calls"] == figures["rollout/unforked_sessions"] == 0.0


def test_swe_grpo_trains_on_longest_paths_alone(tmp_path: Path, open_folder: Path) -> None:
    for figures in train("swe_grpo", tmp_path, open_folder, ESTIMATOR="longest_path"):
        assert figures["tree/paths_per_session/max"] == 1
        assert figures["tree/untrained_rows"] >= 0


def test_swe_ppo_trains_its_critic_on_the_same_trees(tmp_path: Path, open_folder: Path) -> None:
    first, second = train("swe_ppo", tmp_path, open_folder)
    for figures in (first, second):
        assert figures["critic/grad_norm"] > 0
        assert figures["critic/vf_loss"] > 0 or figures["critic/values/max"] == 0.0
    assert first["critic/values/mean"] != second["critic/values/mean"], "the critic has learned something"


def test_an_environment_of_ones_own_trains_as_its_documentation_says(tmp_path: Path, open_folder: Path) -> None:
    text = (RECIPES.parent / "docs" / "environments.md").read_text(encoding="utf-8")
    environment, data_set = re.findall(r"```python\n(.*?)```", text, re.DOTALL)
    (tmp_path / "guess.py").write_text(environment)
    subprocess.run([sys.executable, "-c", data_set], cwd=tmp_path, check=True)
    (override,) = re.findall(r"actor_rollout_ref\S+=guess.GuessEnvironment", text)
    given = {"TRAIN_FILE": "guess.parquet", "PYTHONPATH": str(tmp_path)}
    train("swe_grpo", tmp_path, open_folder, override, **given)


def test_gui_window_trains_on_screenshots(tmp_path: Path) -> None:
    # The model hits no button yet: without the entropy bonus its gradient would be zero.
    changes = ["data.train_batch_size=2", "actor_rollout_ref.actor.ppo_mini_batch_size=2"]
    changes += ["actor_rollout_ref.actor.entropy_coeff=0.01"]
    script = RECIPES / "gui_window" / "run.sh"
    printed = run(["bash", script, *changes], tmp_path, OUTPUT=str(tmp_path / "out"), STEPS="2", SHOWN="2")
    for figures in two_steps(printed, tmp_path):
        assert figures["tree/sessions"] == 16
        assert figures["tree/session/calls"] == 4.0
        assert figures["tree/session/branches"] > 2.0, "every shift of the window starts a branch"
        assert figures["training/rollout_probs_diff_max"] < 1e-5


def test_the_quickstart_runs_to_its_report(tmp_path: Path) -> None:
    variables = {"PYTHONPATH": str(RECIPES), "PYTHONSAFEPATH": "1", "TORCH_COMPILE_DISABLE": "1"}
    variables["COLUMNS"] = "120"  # the table breaks long lines elsewhere
    sizes = ["--demonstrations", "120", "--sft-steps", "20", "--steps", "10", "--repeats", "1"]
    command = [sys.executable, "-m", "quickstart.run", "--output", str(tmp_path / "run"), *sizes]
    printed = run(command, tmp_path, OMP_NUM_THREADS="2", **variables)
    assert "step  10  reward" in printed
    assert "self-check" in printed and "speed-up of this update" in printed
    assert re.search(r"step on trees; with this update alone as rows +[\d.]+ s, [\d.]+ s \([\d.]+ times\)", printed)
    assert (tmp_path / "run" / "report.html").exists()
