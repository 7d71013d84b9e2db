"""verl's stock `main_ppo` on a CPU with rollouts by SGLang: agents branch, trees train, SGLang gets the new weights."""

import shutil
from pathlib import Path

import pytest
from engine_jobs import check_that_the_second_step_samples_anew, figures
from sglang_harness import ROLLOUT_OVERRIDES, environment

pytestmark = [pytest.mark.sglang, pytest.mark.ray, pytest.mark.timeout(900)]

WEIGHTS = Path(__file__).with_name("sglang_cpu_weights.py")


def test_the_second_step_samples_from_the_policy_that_the_first_step_made(tmp_path: Path) -> None:
    pytest.importorskip("sglang", reason="scripts/test_sglang.sh has SGLang")
    shutil.copy(WEIGHTS, tmp_path)
    overrides = [*ROLLOUT_OVERRIDES, f"actor_rollout_ref.model.external_lib={WEIGHTS.stem}"]
    log, _ = check_that_the_second_step_samples_anew(tmp_path, overrides, **environment())
    assert min(figures(log, "tree/por")) > 0.3, "the turns of an agent share their conversation"
