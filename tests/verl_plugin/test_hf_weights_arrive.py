"""Weights of the trainer's engine reach the embedded rollout model under its own names: experts, which it holds in one
tensor a layer, and checkpoints that also read images."""

from pathlib import Path

import pytest
import torch
from engine_harness import build_engine, save_model, tiny_qwen3
from safetensors.torch import load_file
from tiny_families import CONFIGS
from verl.workers.config import HFModelConfig, RolloutConfig
from wrapped_models import wrapped_config, wrapped_model

from tree_rl.verl_plugin.embedded_rollout.server import build_model
from tree_rl.verl_plugin.embedded_rollout.weight_buckets import load, pack
from tree_rl.verl_plugin.options import TreeConfig


@pytest.mark.parametrize("family", ("qwen3_moe", "gemma3", "qwen3_vl"))
def test_every_weight_arrives(tmp_path: Path, family: str) -> None:
    if family in CONFIGS:
        save_model(tmp_path, CONFIGS[family])
    else:
        wrapped_model(wrapped_config(family, tied=family == "gemma3")).save_pretrained(tmp_path)
    sent = dict(build_engine(tmp_path, tree=TreeConfig()).get_per_tensor_param()[0])
    config = RolloutConfig(name="hf", tensor_model_parallel_size=1, dtype="float32")
    torch.manual_seed(1)
    follows, published = (
        build_model(config, HFModelConfig(path=str(tmp_path), load_tokenizer=False), weights_follow=follows)
        for follows in (True, False)
    )
    for bucket in pack(sent.items(), 10_000):
        load(follows, bucket)
    expected = published.state_dict()
    assert all(torch.equal(tensor, expected[name]) for name, tensor in follows.state_dict().items())
    if family in CONFIGS:
        assert any(".experts.3.up_proj." in name for name in sent)
        with pytest.raises(KeyError, match=r"experts\.9\.up_proj"):
            load(follows, next(pack([("model.layers.0.mlp.experts.9.up_proj.weight", torch.zeros(1))], 1)))


@pytest.mark.parametrize("rank", (0, 4), ids=("all weights", "adapter"))
def test_a_tied_weight_is_sent_once_as_in_a_checkpoint(tmp_path: Path, rank: int) -> None:
    save_model(tmp_path, tiny_qwen3(tie_word_embeddings=True))
    engine = build_engine(tmp_path, tree=TreeConfig(), model={"lora_rank": rank, "lora_alpha": 8})
    sent = [name.replace(".base_layer", "") for name, _ in engine.get_per_tensor_param()[0]]
    assert sorted(sent) == sorted(load_file(tmp_path / "model.safetensors"))
