"""verl's stock `main_ppo` on a CPU with rollouts by SGLang: agents branch, trees train, SGLang gets the new weights."""

import json
import shutil
import sys
from pathlib import Path

import pytest
from engine_jobs import AGENT, AGREEMENT, LARGE_STEPS, STALE, figures, run, trained_probabilities
from sglang_harness import ROLLOUT_OVERRIDES, environment
from vllm_harness import save_model

pytestmark = [pytest.mark.sglang, pytest.mark.ray, pytest.mark.timeout(900)]

WEIGHTS = Path(__file__).with_name("sglang_cpu_weights.py")


def test_the_second_step_samples_from_the_policy_that_the_first_step_made(tmp_path: Path) -> None:
    pytest.importorskip("sglang", reason="scripts/test_sglang.sh has SGLang")
    import toy_qwen

    (tmp_path / "asking_agent.py").write_text(AGENT)
    shutil.copy(WEIGHTS, tmp_path)
    model = save_model(tmp_path / "model", toy_qwen.build_tokenizer())
    overrides = toy_qwen.gateway_overrides(tmp_path, str(model), "asking_agent.AskingAgent")
    overrides += [*ROLLOUT_OVERRIDES, *LARGE_STEPS, f"actor_rollout_ref.model.external_lib={WEIGHTS.stem}"]
    log = run([sys.executable, "-m", "verl.trainer.main_ppo", *overrides], tmp_path, **environment())

    differences = figures(log, "training/rollout_probs_diff_max")
    print("\nlargest difference of probabilities, SGLang against the trainer, by step:", differences)
    assert len(differences) == 2 and max(differences) < AGREEMENT
    assert max(figures(log, "tree/self_check_error")) < 1e-4
    assert min(figures(log, "tree/por")) > 0.3, "the turns of an agent share their conversation"

    dumped = "".join(path.read_text() for path in (tmp_path / "trees").glob("train-*.jsonl"))
    rows = [json.loads(line) for line in dumped.splitlines()]
    assert len({(row["step"], row["uid"], row["session"]) for row in rows}) == 2 * 4 * 3
    second = [row for row in rows if row["step"] == 2]
    after_step = next((tmp_path / "out").glob("global_step_1/**/huggingface"))
    moved = float((trained_probabilities(model, second) - trained_probabilities(after_step, second)).abs().max())
    print("largest difference of probabilities, first step's policy against the second's:", moved)
    assert moved > STALE, "the first step must move the policy far enough for stale weights to show"
