"""The PPO recipe as a user runs it: verl's main_ppo, Ray, two ranks, rollouts, tree actor and tree critic."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

RECIPE = Path(__file__).parents[2] / "recipes" / "ppo" / "run_qwen3_fsdp2.sh"


@pytest.mark.slow
@pytest.mark.ray
@pytest.mark.timeout(420)
def test_ppo_recipe_trains_actor_and_critic_on_trees(tmp_path: Path) -> None:
    environment = os.environ | {
        "PYTHON": sys.executable,
        "OUTPUT": str(tmp_path),
        "STEPS": "2",
        "NGPUS": "2",
        "TRAIN_BATCH_SIZE": "6",
        "MINI_BATCH_SIZE": "3",
        "ROLLOUT_N": "4",
        "HF_HUB_OFFLINE": "1",
        "OMP_NUM_THREADS": "1",
    }
    finished = subprocess.run(
        ["bash", RECIPE], env=environment, cwd=tmp_path, capture_output=True, text=True, timeout=400
    )
    assert finished.returncode == 0, finished.stdout[-3000:] + finished.stderr[-3000:]
    steps = [line for line in finished.stdout.splitlines() if "training/global_step:" in line]
    assert len(steps) == 2
    for line in steps:
        figures = {name: float(value) for name, value in re.findall(r"([\w/]+):(?:np\.\w+\()?(-?[\d.e+-]+)", line)}
        assert figures["tree/sessions"] == 24
        assert figures["tree/por"] > 0.5
        assert figures["tree/realised_saving"] > 0.5
        assert figures["tree/critic_realised_saving"] > 0.5
        assert figures["tree/self_check_error"] < 1e-4
        assert figures["training/rollout_probs_diff_max"] < 1e-4
        assert figures["actor/grad_norm"] > 0
        assert figures["critic/grad_norm"] > 0
