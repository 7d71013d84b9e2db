"""verl's stock `main_ppo` on two CPU cores, with the embedded engine, the branching agent loop and the tree manager."""

import json
import re
from pathlib import Path

import numpy as np
import pytest
import toy_qwen

from tree_rl.tree.forest import Forest

pytestmark = [pytest.mark.slow, pytest.mark.ray, pytest.mark.timeout(600)]

ENVIRONMENT = """
    sessions = 0

    async def reset(self, task):
        await super().reset(task)
        CountingEnvironment.sessions += 1
        if CountingEnvironment.sessions == 2:
            raise OSError("this session fails, its siblings must not")

    async def score(self, outcome):
        return float(len(outcome.answer) % 2)
"""


def test_main_ppo_trains_on_branches_and_a_failed_session_costs_only_itself(tmp_path: Path) -> None:
    overrides = [
        *toy_qwen.branching_overrides(tmp_path, "CountingEnvironment", ENVIRONMENT),
        f"+actor_rollout_ref.rollout.custom.tree_dump_dir={tmp_path / 'trees'}",
        "+actor_rollout_ref.model.model_type=tree_language_model",
        "+critic.model.model_type=tree_value_model",
        "trainer.v1.trainer_mode=tree_sync",
        "+ray_kwargs.ray_init.num_gpus=2",
        "trainer.n_gpus_per_node=2",
    ]
    environment = toy_qwen.job_environment(tmp_path)
    finished = toy_qwen.run_main_ppo(tmp_path, overrides, environment=environment, seconds=500)
    log = finished.stdout + finished.stderr
    assert "this session fails" in log
    differences = [float(v) for v in re.findall(r"training/rollout_probs_diff_max:([0-9.e+-]+)", log)]
    assert len(differences) == 2 and max(differences) < 1e-5
    # One optimizer step a batch: the log-probs of that comparison, like the entropy, are those of the update.
    assert log.count("old log-probs are those of the update's forward") == 1
    for name in ("tree/reused_log_probs:1.0", "actor/entropy:", "rollout_corr/kl:"):
        assert log.count(name) == 2, name
    assert "actor/entropy_loss" not in log

    rows = [json.loads(line) for path in (tmp_path / "trees").glob("train-*.jsonl") for line in path.open()]
    sessions = {(row["step"], row["uid"], row["session"]) for row in rows}
    assert len(sessions) == 2 * 4 * 3 - 1
    for uid in {row["uid"] for row in rows}:
        group = [row["prompt_ids"] + row["response_ids"] for row in rows if row["uid"] == uid]
        forest = Forest.from_rows([np.asarray(tokens) for tokens in group])
        assert forest.num_unique < forest.num_flat
    assert all(sum(row["response_mask"]) > 0 and row["reward"] in (0.0, 1.0) for row in rows)
