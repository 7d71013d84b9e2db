"""verl's stock `main_ppo` trains a checkpoint that also reads images on text: rollouts, trees, weights by name."""

import re
import sys
from pathlib import Path

import pytest
import toy_qwen

sys.path.insert(0, str(Path(__file__).parents[1] / "models"))
from wrapped_models import TEXT, wrapped_config, wrapped_model


@pytest.mark.slow
@pytest.mark.ray
@pytest.mark.timeout(420)
@pytest.mark.parametrize("family", ("gemma3", "mistral3"))
def test_two_steps_of_grpo(tmp_path: Path, family: str) -> None:
    tokenizer = toy_qwen.build_tokenizer()
    size = {
        "vocab_size": len(tokenizer),
        "eos_token_id": tokenizer.eos_token_id,
        "pad_token_id": tokenizer.pad_token_id,
    }
    config = wrapped_config(family, tied=True, **{**TEXT, **size})
    model = tmp_path / "model"
    wrapped_model(config).save_pretrained(model)
    tokenizer.save_pretrained(model)
    prompts = toy_qwen.save_prompts(tmp_path / "prompts.parquet", [f"say {i}" for i in range(8)])
    overrides = [
        *toy_qwen.ppo_overrides(str(model), prompts, toy_qwen.save_reward(tmp_path / "reward.py"), tmp_path / "out"),
        "trainer.v1.trainer_mode=tree_sync",
        "+ray_kwargs.ray_init.num_gpus=2",
        "trainer.n_gpus_per_node=2",
    ]
    finished = toy_qwen.run_main_ppo(tmp_path, overrides, environment=toy_qwen.job_environment(tmp_path), seconds=400)
    log = finished.stdout + finished.stderr
    # The second step's rollouts run on the weights that the first has sent.
    differences = [float(value) for value in re.findall(r"training/rollout_probs_diff_max:([0-9.e+-]+)", log)]
    assert len(differences) == 2 and max(differences) < 1e-5
    assert all(float(value) > 0 for value in re.findall(r"actor/grad_norm:([0-9.e+-]+)", log))
