"""A job on a model that trees cannot run, or not as its role asks, ends the driver before Ray, reason first."""

import json
from pathlib import Path
from typing import Any

import pytest
from omegaconf import OmegaConf
from peft import LoraConfig
from tiny_sizes import sizes
from transformers import AutoConfig, PretrainedConfig

from tree_rl.models.fused_layers import has_liger
from tree_rl.verl_plugin.launch.model_check import refuse_model_of_job

TOKENS = {"vocab_size": 64, "bos_token_id": 1, "eos_token_id": 2}
SMALL = sizes(**TOKENS, intermediate_size=32, max_position_embeddings=None, initializer_range=None)
KEY, ENGINE = "actor_rollout_ref.model", "actor_rollout_ref.actor.fsdp_config"
DYNAMIC = {"rope_parameters": {"rope_type": "dynamic", "factor": 2.0, "rope_theta": 1e4}}
ONE_OF_FOUR = {"num_experts_per_tok": 1, "num_local_experts": 4}
UNTIED, REPLAY = {"tie_word_embeddings": False}, {"router_replay": {"mode": "R3"}}
REFUSED: list[tuple[str, dict[str, Any], dict[str, Any], str]] = [
    # (family, its settings, what a job asks of it, reason)
    ("mamba", {}, {}, r"^actor_rollout_ref\.model\.path=.*state is not followed"),
    ("qwen3", DYNAMIC, {}, r"^actor_rollout_ref\.model\.path=.*rope_type=dynamic"),
    ("qwen3_next", {}, {"engine": {"tree": {"mode": "flat"}}}, r"tree\.mode=flat packs rows"),
    (
        "qwen3",
        {},
        {"engine": {"ulysses_sequence_parallel_size": 8}},
        r"fsdp_config\.ulysses_sequence_parallel_size=8 does not divide num_attention_heads=4",
    ),
    ("qwen3", {}, {"engine": REPLAY}, r"no experts .*router_replay\.mode"),
    (
        "qwen3",
        {},
        {"engine": {"tree": {"router_aux_loss_coef": 0.01}}},
        r"no experts .*unset tree\.router_aux_loss_coef",
    ),
    (
        "glm4_moe",
        {"n_routed_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16, "first_k_dense_replace": 1},
        {"engine": {"tree": {"router_aux_loss_coef": 0.01}}},
        r"router_aux_loss_coef=0\.01: the router logits of Glm4MoeDecoderLayer cannot be read; set it to 0",
    ),
    ("mixtral", ONE_OF_FOUR, {"engine": REPLAY}, r"router_replay\.mode=R3"),
    ("qwen3", UNTIED, {"target_modules": ["embed_tokens", "q_proj"]}, r"LoRA on the embedding .*exclude_modules"),
    ("qwen3", UNTIED, {"target_modules": ["q_prj"]}, r"model\.target_modules=\['q_prj'\]: .*not found"),
    ("qwen3", UNTIED, {"target_modules": "["}, r"model\.target_modules=\[: unterminated character set"),
    ("qwen3", UNTIED, {"target_modules": ["mlp"]}, r"model\.target_modules=\['mlp'\]: Target module [^\n]{9,300}$"),
]


def saved(folder: Path, family: str, **settings: Any) -> str:
    config: PretrainedConfig = AutoConfig.for_model(family, **{**SMALL, **settings})
    config.architectures = [f"{type(config).__name__.removesuffix('Config')}ForCausalLM"]
    config.save_pretrained(folder)
    return str(folder)


def check(path: str, engine: dict[str, Any] | None = None, *, is_value: bool = False, **model: Any) -> None:
    node = OmegaConf.create({"path": path, **model})
    engines = {ENGINE: OmegaConf.create(engine or {})}
    refuse_model_of_job(node, key=KEY, engines=engines, is_value=is_value, rollout=None if is_value else "vllm")


@pytest.mark.parametrize("family", ("gemma2", "gpt_oss", "qwen3_next", "mixtral"))
def test_trained_families_pass(tmp_path: Path, family: str) -> None:
    for is_value in (False, True):
        check(saved(tmp_path, family), is_value=is_value)


@pytest.mark.parametrize(("family", "settings", "asked", "reason"), REFUSED)
def test_what_trees_or_an_engine_cannot_do_with_a_model_is_refused(
    tmp_path: Path, family: str, settings: dict[str, Any], asked: dict[str, Any], reason: str
) -> None:
    path = saved(tmp_path, family, **settings)
    if asked:
        check(path)
    adapter = {"lora_rank": 4} if "target_modules" in asked else {}
    if adapter:
        check(path, **adapter, target_modules="all-linear")
    with pytest.raises(ValueError, match=reason):
        check(path, **adapter, **asked)


def test_an_adapters_folder_is_tried_on_the_model(tmp_path: Path) -> None:
    path = saved(tmp_path / "model", "qwen3", tie_word_embeddings=True)
    adapter = LoraConfig(task_type="CAUSAL_LM", r=4, target_modules=["q_proj"], trainable_token_indices=[1])
    adapter.save_pretrained(tmp_path / "adapter")
    with pytest.raises(ValueError, match=r"trainable_token_indices in qwen3"):
        check(path, lora_rank=4, lora_adapter_path=str(tmp_path / "adapter"))


def test_adapters_that_hide_a_routers_bias_are_refused(tmp_path: Path) -> None:
    path = saved(tmp_path, "glm4_moe", n_routed_experts=4, moe_intermediate_size=16, first_k_dense_replace=1)
    with pytest.raises(ValueError, match=r"LoRA on the routers of glm4_moe.*target_modules='\[q_proj"):
        check(path, lora_rank=4, target_modules="all-linear")
    check(path, lora_rank=4, target_modules=["q_proj", "q_b_proj", "kv_b_proj", "o_proj"])


def test_ligers_layers_are_refused_for_families_that_they_do_not_fit(tmp_path: Path) -> None:
    reason = r"model_type=granite.*set actor_rollout_ref\.model\.use_liger=false" if has_liger() else "not installed"
    with pytest.raises(ValueError, match=reason):
        check(saved(tmp_path, "granite"), use_liger=True)
    check(saved(tmp_path, "granite"), use_liger="auto")


def test_a_config_that_nobody_can_read_names_the_key(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text("{")
    with pytest.raises(ValueError, match=r"^actor_rollout_ref\.model\.path=.* cannot read its config\.json"):
        check(str(tmp_path))
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "no_such_family"}))
    with pytest.raises(ValueError, match=r"no_such_family"):
        check(str(tmp_path))


def test_what_this_machine_does_not_have_is_left_to_the_workers(tmp_path: Path) -> None:
    check("no-such-organisation/no-such-model")
    check("hdfs://models/qwen")
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "own", "auto_map": {"AutoConfig": "own.Own"}}))
    check(str(tmp_path))


def test_the_embedded_rollout_refuses_layers_with_a_state(tmp_path: Path) -> None:
    node = OmegaConf.create({"path": saved(tmp_path, "qwen3_next")})
    with pytest.raises(ValueError, match=r"rollout\.name=hf .*set actor_rollout_ref\.rollout\.name=vllm"):
        refuse_model_of_job(node, key=KEY, rollout="hf")
