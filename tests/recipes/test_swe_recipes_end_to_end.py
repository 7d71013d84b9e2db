"""recipes/swe_grpo as a user runs it: main_ppo, Ray, the native agent, gateway, sandboxes and tests, on a CPU."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

RECIPE = Path(__file__).parents[2] / "recipes" / "swe_grpo" / "run_qwen3_fsdp2.sh"


@pytest.mark.ray
@pytest.mark.timeout(420)
def test_swe_grpo_trains_on_what_agents_did_in_sandboxes(
    tmp_path: Path, tmp_path_factory: pytest.TempPathFactory
) -> None:
    sandboxes = tmp_path_factory.mktemp("sandboxes")
    for folder in (sandboxes, *sandboxes.parents):
        if folder.stat().st_uid == os.geteuid() and folder != Path("/"):
            folder.chmod(folder.stat().st_mode | 0o005)
    environment = os.environ | {
        "PYTHON": sys.executable,
        "OUTPUT": str(tmp_path / "out"),
        "STEPS": "2",
        "TRAIN_TASKS": "4",
        "TRAIN_BATCH_SIZE": "2",
        "MINI_BATCH_SIZE": "2",
        "ROLLOUT_N": "3",
        "MAX_TURNS": "2",
        "TURN_LENGTH": "48",
        "ESTIMATOR": "tree_loo",
        "HF_HUB_OFFLINE": "1",
        "RAY_AUTH_MODE": "disabled",
        "OMP_NUM_THREADS": "1",
        "TMPDIR": str(sandboxes),
        "RAY_TMPDIR": "/tmp",
    }
    # The random model repairs nothing: without the entropy bonus its gradient would be zero.
    finished = subprocess.run(
        ["bash", RECIPE, "actor_rollout_ref.actor.entropy_coeff=0.01"],
        env=environment,
        cwd=tmp_path,
        capture_output=True,
        text=True,
        timeout=400,
        check=False,
    )
    assert finished.returncode == 0, finished.stdout[-3000:] + finished.stderr[-3000:]
    steps = [line for line in finished.stdout.splitlines() if "training/global_step:" in line]
    assert len(steps) == 2
    for line in steps:
        figures = {name: float(value) for name, value in re.findall(r"([\w/]+):(?:np\.\w+\()?(-?[\d.e+-]+)", line)}
        assert figures["tree/sessions"] == 6
        assert figures["tree/por"] > 0.3, "sessions of a prompt share it"
        assert figures["tree/session_score/max"] == 0.0
        assert figures["tree/self_check_error"] < 1e-4
        assert figures["training/rollout_probs_diff_max"] < 1e-4
        assert figures["actor/grad_norm"] > 0
    assert not list(sandboxes.glob("tree-rl-*")), "every sandbox is thrown away"
