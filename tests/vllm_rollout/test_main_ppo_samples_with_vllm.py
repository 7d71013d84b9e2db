"""verl's stock `main_ppo` on a CPU with rollouts by vLLM: agents branch, trees train, and vLLM gets the new weights."""

import math
import sys
from pathlib import Path

import numpy as np
import pytest
from engine_jobs import check_that_the_second_step_samples_anew, figures, run
from vllm_harness import ROLLOUT_OVERRIDES

from tree_rl.tree.forest import Forest

pytestmark = [pytest.mark.vllm, pytest.mark.ray, pytest.mark.timeout(900)]

RECIPE = Path(__file__).parents[2] / "recipes" / "swe_grpo" / "run_qwen3_fsdp2.sh"
VOCABULARY = 2048
"""Of the recipe's tiny model."""


def test_the_second_step_samples_from_the_policy_that_the_first_step_made(tmp_path: Path) -> None:
    _, rows = check_that_the_second_step_samples_anew(tmp_path, ROLLOUT_OVERRIDES)
    assert len(rows) >= 3 * 2 * 4 * 3
    for uid in {row["uid"] for row in rows}:
        group = [np.asarray(row["prompt_ids"] + row["response_ids"]) for row in rows if row["uid"] == uid]
        forest = Forest.from_rows(group)
        assert forest.num_unique < 0.7 * forest.num_flat


@pytest.mark.parametrize(
    "branching", ["", "{policy: turns, options: {expansions: 1}}"], ids=["no branches", "branches by turns"]
)
def test_swe_grpo_trains_on_what_agents_did_with_vllm(tmp_path: Path, open_folder: Path, branching: str) -> None:
    from transformers import AutoTokenizer

    settings = {"PYTHON": sys.executable, "ROLLOUT": "vllm", "OUTPUT": str(tmp_path / "out")}
    settings |= {"STEPS": "2", "TRAIN_TASKS": "4", "TRAIN_BATCH_SIZE": "2", "MINI_BATCH_SIZE": "2", "ROLLOUT_N": "3"}
    settings |= {"MAX_TURNS": "2", "TURN_LENGTH": "48", "TMPDIR": str(open_folder), "RAY_TMPDIR": "/tmp"}
    # The random model repairs nothing: without the entropy bonus its gradient would be zero.
    overrides = ["actor_rollout_ref.actor.entropy_coeff=0.01"]
    if branching:
        overrides.append(f"+actor_rollout_ref.rollout.custom.gateway_agent.branching={branching}")
    log = run(["bash", str(RECIPE), *overrides], tmp_path, **settings)
    branches, failed = figures(log, "tree/branches_per_session"), figures(log, "rollout/unforked_sessions")
    assert failed == [0, 0] and (min(branches) > 0) == bool(branching)
    assert figures(log, "tree/sessions") == pytest.approx([6 * (1 + more) for more in branches])
    assert min(figures(log, "tree/por")) > 0.3, "sessions of a prompt share it"
    assert min(figures(log, "actor/grad_norm")) > 0
    # The model's vocabulary is padded. verl forbids vLLM to draw padding, which the trainer's softmax includes: random
    # weights give it its share of the probability, and every log-prob differs by that.
    share = len(AutoTokenizer.from_pretrained(tmp_path / "out" / "model")) / VOCABULARY
    expected = -math.log(share)
    differences = figures(log, "rollout_corr/log_ppl_diff")
    assert len(differences) == 2 and differences == pytest.approx([expected] * 2, abs=1e-3)
    assert max(figures(log, "training/rollout_probs_diff_max")) < 1e-4
    assert not list(open_folder.glob("tree-rl-*")), "every sandbox is thrown away"
