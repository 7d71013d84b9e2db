"""Tiny models with experts or recurrent layers, and that trees train a model as rows alone."""

from pathlib import Path
from typing import Any

import torch
import torch.distributed
import transformers
from engine_harness import VOCAB, Row, build_engine
from equal_gradients import gradients
from equivalence import alone, assert_trains_as
from hostile_rows import SHAPES
from latent_models import latent_configs
from recurrent_models import recurrent_configs
from stock_routers import auxiliary_loss
from tiny_sizes import DELTA_NET, sizes
from transformers.models.qwen3_5.configuration_qwen3_5 import Qwen3_5TextConfig

from tree_rl.verl_plugin.options import TreeConfig

EXPERTS, COEF = 6, 0.3
SHARED = {"vocab_size": VOCAB, "max_position_embeddings": 512}
SIZES: dict[str, Any] = sizes(**SHARED, intermediate_size=24, num_experts_per_tok=2, bos_token_id=1, eos_token_id=2)
LATENT = latent_configs(**SHARED)["deepseek_v3"]
CONFIGS: dict[str, transformers.PretrainedConfig] = {
    "qwen3_moe": transformers.Qwen3MoeConfig(**SIZES, num_experts=EXPERTS, moe_intermediate_size=16),
    "deepseek_v3": transformers.DeepseekV3Config(**{**LATENT.to_dict(), "first_k_dense_replace": 0}),
}


def auxiliary_gradients(path: Path, batch: list[Row]) -> tuple[float, dict[str, torch.Tensor]]:
    """Transformers' own auxiliary loss of all rows in one padded batch, and its gradients."""
    model = transformers.AutoModelForCausalLM.from_pretrained(path, attn_implementation="eager", dtype=torch.float32)
    loss = auxiliary_loss(model, [row.tokens for row in batch])
    return loss.item(), gradients(model, loss)


WIDE = {"intermediate_size": 48, "initializer_range": 0.06, "pad_token_id": None}
HYBRID_SIZES: dict[str, Any] = sizes(**SHARED, **WIDE, num_hidden_layers=4, **DELTA_NET)
FEW_EXPERTS = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16}
FEW_EXPERTS |= {"shared_expert_intermediate_size": 16, "mlp_only_layers": [0, 1, 2, 3]}
GATED_DELTA_NET: dict[str, transformers.PretrainedConfig] = {
    "qwen3_next": transformers.Qwen3NextConfig(**HYBRID_SIZES, **FEW_EXPERTS),
    "qwen3_5": Qwen3_5TextConfig(**HYBRID_SIZES),
}
_RECURRENT = recurrent_configs(vocab_size=VOCAB, **WIDE)
RECURRENT = {family: _RECURRENT[family] for family in ("lfm2", "granite_4", "nemotron_h", "falcon_h1", "zamba2")}


def wrapped_apart(path: Path) -> dict[str, Any] | None:
    """Engine options with which stock verl runs a model: it would shard the blocks that layers of Zamba 2 share once
    for each layer, which FSDP2 refuses."""
    if transformers.AutoConfig.from_pretrained(path).model_type != "zamba2":
        return None
    return {"wrap_policy": {"transformer_layer_cls_to_wrap": ["Zamba2MambaDecoderLayer"]}}


def save_hybrid(path: Path, config: transformers.PretrainedConfig) -> Path:
    """A random hybrid on disk, whose states decay slowly: stock's float32 sums of large decays are no yardstick."""
    torch.manual_seed(0)
    model = transformers.AutoModelForCausalLM.from_config(config)
    for name, parameter in model.named_parameters():
        if name.endswith("A_log"):
            torch.nn.init.uniform_(parameter, -4.0, -1.0)
    model.save_pretrained(path)
    return path


def assert_trains(path: Path, shapes: tuple[str, ...]) -> None:
    """Whole, and cut to a few tokens with recomputed layers, as stock verl on rows alone."""
    stock = build_engine(path, tree=None, engine=wrapped_apart(path))
    trees = [
        build_engine(path, tree=TreeConfig(mode="auto", max_tokens=1000)),
        build_engine(path, tree=TreeConfig(max_tokens=3), model={"enable_gradient_checkpointing": True}),
    ]
    for shape in shapes:
        expected = alone(stock, SHAPES[shape])
        for tree in trees:
            assert_trains_as(expected, tree, SHAPES[shape])
