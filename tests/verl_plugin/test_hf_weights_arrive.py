"""Weights of experts reach the embedded rollout model, which holds those of a layer in one tensor."""

from pathlib import Path

import pytest
import torch
from engine_harness import build_engine, save_model
from tiny_families import CONFIGS
from transformers import AutoModelForCausalLM

from tree_rl.verl_plugin.embedded_rollout.weight_buckets import load, pack
from tree_rl.verl_plugin.options import TreeConfig


def test_every_weight_of_every_expert_arrives(tmp_path: Path) -> None:
    engine = build_engine(save_model(tmp_path, CONFIGS["qwen3_moe"]), tree=TreeConfig())
    sent = dict(engine.get_per_tensor_param()[0])
    assert any(".experts.3.up_proj." in name for name in sent)
    torch.manual_seed(1)
    model = AutoModelForCausalLM.from_config(CONFIGS["qwen3_moe"], dtype=torch.float32)
    for bucket in pack(sent.items(), 10_000):
        load(model, bucket)
    expected = AutoModelForCausalLM.from_pretrained(tmp_path).state_dict()
    assert all(torch.equal(tensor, expected[name]) for name, tensor in model.state_dict().items())
    with pytest.raises(KeyError, match=r"experts\.9\.up_proj"):
        load(model, next(pack([("model.layers.0.mlp.experts.9.up_proj.weight", torch.zeros(1))], 1)))
