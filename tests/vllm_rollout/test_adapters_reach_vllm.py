"""LoRA with vLLM end to end: adapters reach it every step; one that does not ends the run in its second step."""

import sys
from pathlib import Path

import pytest
from engine_jobs import AGENT, AGREEMENT, LARGE_STEPS, figures, run
from vllm_harness import GPU, ROLLOUT_OVERRIDES, save_model

pytestmark = [pytest.mark.vllm, pytest.mark.ray, pytest.mark.timeout(900)]

WITHHELD = """
from verl.workers.rollout.vllm_rollout.vllm_rollout import ServerAdapter

update_weights = ServerAdapter.update_weights


async def update_base_weights(self, weights, global_steps=None, **more):
    if not (more.get("peft_config") and more.get("base_sync_done")):
        return await update_weights(self, weights, global_steps=global_steps, **more)
    list(weights)  # a collective
    await self.server_handle.set_global_steps.remote(global_steps)


ServerAdapter.update_weights = update_base_weights
"""
LORA = (
    "actor_rollout_ref.model.lora_rank=8",
    "actor_rollout_ref.model.lora_alpha=16",
    "trainer.total_training_steps=3",
    "actor_rollout_ref.actor.checkpoint.save_contents=[model]",
    # vLLM's kernels for adapters on a GPU take 16-bit numbers alone; the trainer stays in float32.
    *(["actor_rollout_ref.rollout.dtype=bfloat16"] if GPU else []),
)
ROUNDING = 0.05
"""Of probabilities in bf16."""


def job(folder: Path, *overrides: str, fails: bool) -> str:
    import toy_qwen

    (folder / "asking_agent.py").write_text(AGENT)
    (folder / "withheld.py").write_text(WITHHELD)
    model = save_model(folder / "model", toy_qwen.build_tokenizer(), tied=True)
    given = toy_qwen.gateway_overrides(folder, str(model), "asking_agent.AskingAgent")
    command = [sys.executable, "-m", "verl.trainer.main_ppo", *given, *ROLLOUT_OVERRIDES, *LARGE_STEPS, *LORA]
    return run([*command, "trainer.save_freq=-1", *overrides], folder, fails=fails)


def test_vllm_samples_with_the_adapter_of_every_step(tmp_path: Path) -> None:
    log = job(tmp_path, fails=False)
    differences, shares = (
        figures(log, name) for name in ("training/rollout_probs_diff_max", "tree/adapter_in_rollout")
    )
    print("\nlargest difference of probabilities by step:", differences, "share of the adapter's effect:", shares)
    assert len(differences) == 3 and max(differences) < (ROUNDING if GPU else AGREEMENT)
    # The adapter is zero in the first step, and the question closed after the second.
    assert shares == pytest.approx([1], abs=ROUNDING if GPU else 1e-2)
    assert log.count("adapter: the rollout samples with it") == 1


def test_an_adapter_that_never_reaches_vllm_ends_the_run(tmp_path: Path) -> None:
    log = job(tmp_path, "actor_rollout_ref.model.external_lib=withheld", fails=True)
    assert "AdapterMissingError: the rollout samples without the LoRA adapter" in log
    assert len(figures(log, "training/rollout_probs_diff_max")) == 1, "the first step cannot show it"
