"""The recipe with screenshots as a user runs it: main_ppo, Ray, the gateway, rows with images."""

from pathlib import Path

import pytest
from finished_run import run

from tree_rl.inspection.files.run_log import read_run

RECIPES = Path(__file__).parents[2] / "recipes"


@pytest.mark.ray
@pytest.mark.slow
@pytest.mark.timeout(900)
def test_two_steps_train_on_screenshots(tmp_path: Path) -> None:
    # The model hits no button yet: without the entropy bonus its gradient would be zero.
    changes = ["data.train_batch_size=2", "actor_rollout_ref.actor.ppo_mini_batch_size=2"]
    changes += ["actor_rollout_ref.actor.entropy_coeff=0.01"]
    script = RECIPES / "gui_window" / "run.sh"
    printed = run(["bash", script, *changes], tmp_path, OUTPUT=str(tmp_path / "out"), STEPS="2", SHOWN="2")
    log = tmp_path / "console.txt"
    log.write_text(printed)
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
