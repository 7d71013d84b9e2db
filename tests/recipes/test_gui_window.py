"""The recipe with screenshots as a user runs it: main_ppo, Ray, the gateway, rows with images."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tree_rl.inspection.files.run_log import read_run

RECIPES = Path(__file__).parents[2] / "recipes"


@pytest.mark.ray
@pytest.mark.slow
@pytest.mark.timeout(900)
def test_two_steps_train_on_screenshots(tmp_path: Path) -> None:
    environment = os.environ | {
        "PYTHON": sys.executable,
        "OUTPUT": str(tmp_path / "out"),
        "STEPS": "2",
        "SHOWN": "2",
        "HF_HUB_OFFLINE": "1",
        "RAY_TMPDIR": "/tmp",
    }
    sizes = ["data.train_batch_size=2", "actor_rollout_ref.actor.ppo_mini_batch_size=2"]
    # The model hits no button yet: without the entropy bonus its gradient would be zero.
    finished = subprocess.run(
        ["bash", RECIPES / "gui_window" / "run.sh", *sizes, "actor_rollout_ref.actor.entropy_coeff=0.01"],
        env=environment,
        cwd=tmp_path,
        capture_output=True,
        text=True,
        timeout=860,
        check=False,
    )
    assert finished.returncode == 0, finished.stdout[-3000:] + finished.stderr[-3000:]
    log = tmp_path / "console.txt"
    log.write_text(finished.stdout)
    steps = read_run(log).metrics
    assert len(steps) == 2
    for figures in steps:
        assert figures["tree/sessions"] == 16
        assert figures["tree/session/calls"] == 4.0
        assert figures["tree/session/branches"] > 2.0, "every shift of the window starts a branch"
        assert figures["tree/por"] > 0.3, "sessions of a task share screens"
        assert figures["tree/self_check_error"] < 1e-4
        assert figures["training/rollout_probs_diff_max"] < 1e-5
        assert figures["actor/grad_norm"] > 0
