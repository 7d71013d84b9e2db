"""R2 through verl's stock `main_ppo` and Ray: old log-probs record routes, TransferQueue carries them, updates repeat
them. An update that finds no routes in its rows refuses, so a run that ends has carried them.
"""

from pathlib import Path

import pytest
import toy_qwen
from transformers import Qwen3MoeConfig

pytestmark = [pytest.mark.ray, pytest.mark.slow, pytest.mark.timeout(1200)]

ENGINE = "actor_rollout_ref.actor.fsdp_config"
EXPERTS = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32}
REPEATED = [
    "+actor_rollout_ref.model.model_type=tree_language_model",
    f"++{ENGINE}._target_=tree_rl.verl_plugin.options.TreeFSDPEngineConfig",
    f"+{ENGINE}.router_replay.mode=R2",
    f"+{ENGINE}.tree.router_aux_loss_coef=0",
]
SAME = ("critic/score/mean", "response_length/mean", "actor/entropy", "actor/pg_loss", "actor/grad_norm")


def steps_of(folder: Path, *more: str, **variables: str) -> list[dict[str, float]]:
    """The metrics of two steps of a tiny model with experts; `variables` are the environment's."""
    folder.mkdir()
    model = toy_qwen.save_model(folder / "model", Qwen3MoeConfig, **EXPERTS)
    prompts = toy_qwen.save_prompts(folder / "prompts.parquet", toy_qwen.PROMPTS)
    overrides = toy_qwen.ppo_overrides(model, prompts, toy_qwen.save_reward(folder / "reward.py"), folder / "out")
    overrides += ["+ray_kwargs.ray_init.num_gpus=1", "trainer.n_gpus_per_node=1", *more]
    finished = toy_qwen.run_main_ppo(folder, overrides, environment=toy_qwen.job_environment(**variables), seconds=500)
    steps = toy_qwen.read_metrics(finished.stdout + finished.stderr)
    assert len(steps) == 2
    return steps


def test_an_update_that_repeats_its_routes_is_that_of_stock_verl(tmp_path: Path) -> None:
    # Weights move so little that routers of stock verl choose in the second update of a step what they chose before.
    # Greedy: runs sample the same rows; siblings are twins then, so the advantage is one of prompts.
    alike = (
        "actor_rollout_ref.actor.ppo_mini_batch_size=2",
        "actor_rollout_ref.rollout.top_k=1",
        "algorithm.adv_estimator=reinforce_plus_plus",
    )
    # verl registers its own engine for cuda and npu alone; it takes the one of this device's name.
    flat = steps_of(tmp_path / "flat", *alike, VERL_ENGINE_DEVICE="cuda")
    tree = steps_of(tmp_path / "tree", *alike, *REPEATED)
    for one, other in zip(flat, tree, strict=True):
        assert other["actor/tree/unique_tokens"] < other["actor/tree/flat_tokens"]
        assert other["actor/tree/self_check_error"] < 1e-4 and other["actor/moe/load_max_over_mean"] > 1
        assert [other[name] for name in SAME] == pytest.approx([one[name] for name in SAME], rel=1e-4, abs=1e-6)
