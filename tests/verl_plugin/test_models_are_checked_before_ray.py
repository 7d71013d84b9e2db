"""A job on a model that trees cannot run, or not as its role asks, ends the driver before Ray, reason first.

So does one on rows with images that a part of the job cannot read.
"""

import json
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from omegaconf import OmegaConf
from peft import LoraConfig
from tiny_sizes import sizes
from transformers import AutoConfig
from wrapped_models import WRAPPED, wrapped_config

from tree_rl.models.fused_layers import has_liger
from tree_rl.verl_plugin.launch import model_check
from tree_rl.verl_plugin.refusals.refusal import Of, UnsupportedFeatureError
from tree_rl.verl_plugin.refusals.table import refuse_if_unsupported

TOKENS = {"vocab_size": 64, "bos_token_id": 1, "eos_token_id": 2}
SMALL = sizes(**TOKENS, intermediate_size=32, max_position_embeddings=None, initializer_range=None)
KEY, ENGINE = "actor_rollout_ref.model", "actor_rollout_ref.actor.fsdp_config"
DYNAMIC = {"rope_parameters": {"rope_type": "dynamic", "factor": 2.0, "rope_theta": 1e4}}
ONE_OF_FOUR = {"num_experts_per_tok": 1, "num_local_experts": 4}
ROUTED = {"n_routed_experts": 4, "moe_intermediate_size": 16, "first_k_dense_replace": 1}
SHARED = {"engine": {"ulysses_sequence_parallel_size": 8}}
BALANCED = {"engine": {"tree": {"router_aux_loss_coef": 0.01}}}
UNTIED, REPLAY = {"tie_word_embeddings": False}, {"router_replay": {"mode": "R3"}}
REFUSED: list[tuple[str, dict[str, Any], dict[str, Any], str]] = [
    # (family, its settings, what a job asks of it, reason)
    ("mamba", {}, {}, r"^actor_rollout_ref\.model\.path=.*state is not followed"),
    ("qwen3", DYNAMIC, {}, r"^actor_rollout_ref\.model\.path=.*rope_type=dynamic"),
    ("qwen3_next", {}, {"engine": {"tree": {"mode": "flat"}}}, r"tree\.mode=flat packs rows"),
    ("qwen3_next", {}, {"rollout": "hf"}, r"rollout\.name=hf .*set actor_rollout_ref\.rollout\.name=vllm"),
    ("qwen3", {}, SHARED, r"fsdp_config\.ulysses_sequence_parallel_size=8 does not divide num_attention_heads=4"),
    ("qwen3", {}, {"engine": REPLAY}, r"no experts .*router_replay\.mode"),
    ("qwen3", {}, BALANCED, r"no experts .*unset tree\.router_aux_loss_coef"),
    (
        *("glm4_moe", ROUTED | {"num_experts_per_tok": 2}, BALANCED),
        r"router_aux_loss_coef=0\.01: the router logits of Glm4MoeDecoderLayer cannot be read; set it to 0",
    ),
    ("mixtral", ONE_OF_FOUR, {"engine": REPLAY}, r"router_replay\.mode=R3"),
    ("qwen3", UNTIED, {"target_modules": ["embed_tokens", "q_proj"]}, r"LoRA on the embedding .*exclude_modules"),
    ("qwen3", UNTIED, {"target_modules": ["q_prj"]}, r"model\.target_modules=\['q_prj'\]: .*not found"),
    ("qwen3", UNTIED, {"target_modules": "["}, r"model\.target_modules=\[: unterminated character set"),
    ("qwen3", UNTIED, {"target_modules": ["mlp"]}, r"model\.target_modules=\['mlp'\]: Target module [^\n]{9,300}$"),
    ("llama4", {}, {}, r"^actor_rollout_ref\.model\.path=.* cannot train on trees: .*chunked_attention"),
    ("mllama", {}, {}, "cannot train on trees: .*attend to images alone"),
    ("paligemma", {}, {}, "cannot train on trees: .*tokens of a text see tokens behind them"),
    ("qwen3_5", {"attention_dropout": 0.1}, {}, r"cannot train on trees: .*attention_dropout=0\.1"),
]
FAMILIES = (
    *("gemma2", "gpt_oss", "qwen3_next", "mixtral"),
    *("qwen3_5", "gemma3", "mistral3", "gemma4", "qwen2_5_vl", "qwen3_vl_moe", "glm46v", "idefics3"),
)


def saved(folder: Path, family: str, **settings: Any) -> str:
    reads_images = family in WRAPPED
    config = wrapped_config(family, **settings) if reads_images else AutoConfig.for_model(family, **SMALL | settings)
    kind = "ConditionalGeneration" if reads_images else "CausalLM"
    config.architectures = [f"{type(config).__name__.removesuffix('Config')}For{kind}"]
    config.save_pretrained(folder)
    return str(folder)


def check(
    path: str, engine: dict[str, Any] | None = None, *, rollout: str | None = "vllm", value: bool = False, **model: Any
) -> None:
    engines, node = {ENGINE: OmegaConf.create(engine or {})}, OmegaConf.create({"path": path, **model})
    model_check.refuse_model_of_job(node, key=KEY, engines=engines, is_value=value, rollout=rollout)


@pytest.mark.parametrize("family", FAMILIES)
def test_trained_families_pass(tmp_path: Path, family: str) -> None:
    path = saved(tmp_path, family)
    check(path)
    check(path, value=True, rollout=None)


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
    path = saved(tmp_path, "glm4_moe", **ROUTED)
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


def test_the_named_remedy_is_one(tmp_path: Path) -> None:
    path = saved(tmp_path, "gemma3", attention_dropout=0.1)
    check(path, override_config={"text_config": {"attention_dropout": 0.0}})


@pytest.mark.parametrize(
    ("family", "rollout", "given", "becomes"),
    (
        ("qwen2_5_vl", "vllm", "dummy", "auto"),
        ("qwen3_vl", "vllm", "dummy", "auto"),
        ("qwen2_5_vl", "vllm", "safetensors", "safetensors"),
        ("qwen2_5_vl", "hf", "dummy", "dummy"),
        ("gemma3", "vllm", "dummy", "dummy"),
    ),
)
def test_vllm_reads_weights_before_images(tmp_path: Path, family: str, rollout: str, given: str, becomes: str) -> None:
    model, options = {"path": saved(tmp_path, family)}, {"name": rollout, "load_format": given}
    config = OmegaConf.create({"actor_rollout_ref": {"model": model, "rollout": options}})
    note = model_check.load_before_images(config)
    assert config.actor_rollout_ref.rollout.load_format == becomes and (note is None) == (given == becomes)


def test_options_of_pixels_that_vllm_reads_elsewhere_are_refused() -> None:
    options = {"data": {"mm_processor_kwargs": {"do_normalize": False}}}
    config = OmegaConf.create(options | {"actor_rollout_ref": {"rollout": {"name": "vllm"}}})
    said = r"kwargs\.do_normalize: vLLM reads it in the model's folder alone"
    with pytest.raises(UnsupportedFeatureError, match=said):
        refuse_if_unsupported(config, "", Of.JOB)
    config.actor_rollout_ref.rollout.name = "hf"
    refuse_if_unsupported(config, "", Of.JOB)


@pytest.mark.parametrize("column", ("images", "videos", "pictures"))
def test_files_with_images_are_refused_by_row(tmp_path: Path, column: str) -> None:
    file = tmp_path / "rows.parquet"
    pq.write_table(pa.table({"prompt": ["a", "b", "c"], column: [[], None, ["x.png"]]}), file)
    files = str(file) if column == "videos" else [str(file)]
    data = OmegaConf.create({"train_files": files, "image_key": "pictures" if column == "pictures" else "images"})
    said = rf"^data\.train_files=.*rows\.parquet: row 2 has {column}; "
    for reason in ({}, {"why": "a part reads none"}, *([{"why": None}] if column == "videos" else [])):
        with pytest.raises(ValueError, match=said + (reason.get("why") or "trees run rows of text: drop")):
            model_check.refuse_rows_with_images(data, **reason)
    if column != "videos":
        model_check.refuse_rows_with_images(data, why=None)
    pq.write_table(pa.table({"prompt": ["a", "b"], column: [[], None]}, schema=pq.read_schema(file)), file)
    model_check.refuse_rows_with_images(data)


@pytest.mark.parametrize(
    ("family", "rollout", "loop", "why"),
    (
        ("qwen3_vl", "vllm", "tool_agent", None),
        ("gemma3", "vllm", "tool_agent", "trees run rows of text"),
        ("qwen3_vl", "hf", "tool_agent", None),
        ("qwen3_vl", "vllm", "tree_gateway_agent", "agents of tree_gateway_agent get a sample's text alone"),
    ),
)
def test_parts_without_images_are_named(tmp_path: Path, family: str, rollout: str, loop: str, why: str | None) -> None:
    options = {"name": rollout, "agent": {"default_agent_loop": loop}}
    roles = {"model": {"path": saved(tmp_path, family)}, "rollout": options}
    assert model_check.why_no_images(OmegaConf.create({"actor_rollout_ref": roles})) == why
