"""A job on a checkpoint that also reads images: what trees cannot run ends the driver before Ray, reason first."""

from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from omegaconf import OmegaConf
from wrapped_models import wrapped_config

from tree_rl.models import UnsupportedModelError
from tree_rl.verl_plugin.launch.model_check import (
    load_before_images,
    refuse_model_of_job,
    refuse_rows_with_images,
    why_no_images,
)
from tree_rl.verl_plugin.refusals.refusal import Of, UnsupportedFeatureError
from tree_rl.verl_plugin.refusals.table import refuse_if_unsupported

PUBLISHED = ("qwen3_5", "gemma3", "mistral3", "gemma4", "qwen2_5_vl", "qwen3_vl_moe", "glm46v", "idefics3")


def saved(path: Path, family: str, **text: Any) -> str:
    config = wrapped_config(family, **text)
    config.architectures = [f"{family}ForConditionalGeneration"]
    config.save_pretrained(path)
    return str(path)


def node(path: str, **more: Any) -> Any:
    return OmegaConf.create({"path": path, **more})


@pytest.mark.parametrize("family", PUBLISHED)
def test_published_kinds_pass(tmp_path: Path, family: str) -> None:
    path = saved(tmp_path, family)
    refuse_model_of_job(node(path), key="model")
    refuse_model_of_job(node(path), key="critic.model", is_value=True)


@pytest.mark.parametrize(
    ("family", "text", "reason"),
    (
        ("llama4", {}, "chunked_attention"),
        ("mllama", {}, "attend to images alone"),
        ("paligemma", {}, "tokens of a text see tokens behind them"),
        ("qwen3_5", {"attention_dropout": 0.1}, r"attention_dropout=0\.1"),
    ),
)
def test_others_are_refused_with_the_reason(tmp_path: Path, family: str, text: dict[str, Any], reason: str) -> None:
    with pytest.raises(UnsupportedModelError, match=rf"^model\.path=.* cannot train on trees: .*{reason}"):
        refuse_model_of_job(node(saved(tmp_path, family, **text)), key="model")


def test_the_named_remedy_is_one(tmp_path: Path) -> None:
    path = saved(tmp_path, "gemma3", attention_dropout=0.1)
    refuse_model_of_job(node(path, override_config={"text_config": {"attention_dropout": 0.0}}), key="model")


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
    model = node(saved(tmp_path, family))
    config = OmegaConf.create(
        {"actor_rollout_ref": {"model": model, "rollout": {"name": rollout, "load_format": given}}}
    )
    note = load_before_images(config)
    assert config.actor_rollout_ref.rollout.load_format == becomes and (note is None) == (given == becomes)


def test_options_of_pixels_that_vllm_reads_elsewhere_are_refused() -> None:
    options = {"data": {"mm_processor_kwargs": {"do_normalize": False}}}
    config = OmegaConf.create(options | {"actor_rollout_ref": {"rollout": {"name": "vllm"}}})
    with pytest.raises(
        UnsupportedFeatureError, match=r"kwargs\.do_normalize: vLLM reads it in the model's folder alone"
    ):
        refuse_if_unsupported(config, "", Of.JOB)
    config.actor_rollout_ref.rollout.name = "hf"
    refuse_if_unsupported(config, "", Of.JOB)


@pytest.mark.parametrize("column", ("images", "videos", "pictures"))
def test_files_with_images_are_refused_by_row(tmp_path: Path, column: str) -> None:
    file = tmp_path / "rows.parquet"
    pq.write_table(pa.table({"prompt": ["a", "b", "c"], column: [[], None, ["x.png"]]}), file)
    data = OmegaConf.create({"train_files": [str(file)], "image_key": "pictures" if column == "pictures" else "images"})
    with pytest.raises(ValueError, match=rf"^data\.train_files=.*rows\.parquet: row 2 has {column}; trees run rows of"):
        refuse_rows_with_images(data, ("train_files", "val_files"))
    pq.write_table(pa.table({"prompt": ["a", "b"], column: [[], None]}, schema=pq.read_schema(file)), file)
    refuse_rows_with_images(data, ("train_files", "val_files"))


@pytest.mark.parametrize(
    ("family", "rollout", "loop", "why"),
    (
        ("qwen3_vl", "vllm", "tool_agent", None),
        ("gemma3", "vllm", "tool_agent", "trees run rows of text"),
        ("qwen3_vl", "hf", "tool_agent", None),
        ("qwen3_vl", "vllm", "tree_gateway_agent", "agents of tree_gateway_agent get a sample's text alone"),
    ),
)
def test_files_with_images_pass_where_all_parts_read_them(
    tmp_path: Path, family: str, rollout: str, loop: str, why: str | None
) -> None:
    file = tmp_path / "rows.parquet"
    pq.write_table(pa.table({"prompt": ["a", "b"], "images": [[], ["x.png"]], "videos": [None, None]}), file)
    model = node(saved(tmp_path / family, family))
    options = {"name": rollout, "agent": {"default_agent_loop": loop}}
    found = why_no_images(OmegaConf.create({"actor_rollout_ref": {"model": model, "rollout": options}}))
    assert found == why
    data = OmegaConf.create({"train_files": str(file)})
    if why is None:
        refuse_rows_with_images(data, ["train_files"], why=None)
        pq.write_table(pa.table({"prompt": ["a"], "videos": [["x.mp4"]]}), file)
    with pytest.raises(ValueError, match=r"has videos; trees run" if why is None else f"row 1 has images; {why}: drop"):
        refuse_rows_with_images(data, ["train_files"], why=found)
