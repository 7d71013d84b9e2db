"""Models by name as their config.json describes them, for predictions and for benchmarks with random weights."""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

from tree_rl.cost.cost_model import ModelShape
from tree_rl.cost.hybrid_layers import PATTERN

KINDS = ("layer_types", "layers_block_type")
"""Entries with the kind of every layer."""


@dataclass(frozen=True, kw_only=True, slots=True)
class ModelSize:
    """A model."""

    config: Mapping[str, Any]
    """Entries of config.json, with which transformers builds the model's config."""

    @property
    def shape(self) -> ModelShape:
        """Sizes that decide the cost."""
        return ModelShape.from_config(self.config)

    def with_layers(self, layers: int | None) -> "ModelSize":
        """The same model with another number of layers, whose kinds recur; None keeps it."""
        layers = layers or int(self.config["num_hidden_layers"])
        known = {name: self.config[name] for name in KINDS if name in self.config}
        kinds = {name: (one * (layers // len(one) + 1))[:layers] for name, one in known.items()}
        return replace(self, config={**self.config, "num_hidden_layers": layers, **kinds})


def _model(
    model_type: str, *, hidden: int, layers: int, width: int, heads: int, kv_heads: int, vocab: int, **more: Any
) -> ModelSize:
    """A model of these sizes; `width` is that of an MLP without experts, `more` are entries by their own names."""
    sizes = {
        "model_type": model_type,
        "hidden_size": hidden,
        "intermediate_size": width,
        "num_hidden_layers": layers,
        "num_attention_heads": heads,
        "num_key_value_heads": kv_heads,
        "vocab_size": vocab,
        "max_position_embeddings": 131_072,
        "tie_word_embeddings": False,
    }
    return ModelSize(config={**sizes, **more})


def _qwen3_5(*, layers: int, key_heads: int, value_heads: int, state: int, **sizes: int) -> ModelSize:
    """Every fourth layer has attention, the others are Gated DeltaNets."""
    more = {"linear_num_key_heads": key_heads, "linear_num_value_heads": value_heads}
    more |= {"linear_key_head_dim": state, "linear_value_head_dim": state}
    kinds = [*["linear_attention"] * 3, "full_attention"] * (layers // 4)
    return _model("qwen3_5_text", layers=layers, layer_types=kinds, tie_word_embeddings=True, **more, **sizes)


def _qwen3_moe(*, experts: int, per_token: int, expert: int, **sizes: int) -> ModelSize:
    """`expert` is the width of one."""
    more = {"num_experts": experts, "num_experts_per_tok": per_token, "moe_intermediate_size": expert}
    return _model("qwen3_moe", norm_topk_prob=True, **more, **sizes)


def _latent(
    model_type: str, *, query: int | None, rank: int, key: int, rotary: int, value: int, expert: int, **more: int
) -> ModelSize:
    """Multi-head latent attention, and experts in all layers but the first; `key` is a key's size without positions."""
    sizes = {"kv_lora_rank": rank, "qk_nope_head_dim": key, "qk_rope_head_dim": rotary, "v_head_dim": value}
    sizes |= {"moe_intermediate_size": expert, "first_k_dense_replace": 1}
    return _model(model_type, q_lora_rank=query, **sizes, **more)


def _nemotron_h(*, pattern: str, mamba_heads: int, head_size: int, state: int, **sizes: int) -> ModelSize:
    """`pattern` has the kinds of all layers as in Nemotron-H's `hybrid_override_pattern`."""
    more = {"mamba_num_heads": mamba_heads, "mamba_head_dim": head_size, "ssm_state_size": state}
    more |= {"n_groups": min(mamba_heads, 8), "layers": len(pattern)}
    kinds = [PATTERN[kind] for kind in pattern]
    return _model("nemotron_h", layers_block_type=kinds, **more, **sizes)


_qwen3 = partial(_model, "qwen3", head_dim=128, vocab=151_936)
_TINY = {"hidden": 64, "width": 128, "heads": 4, "vocab": 512}

MODEL_SIZES = {
    "tiny": _model("qwen3", layers=2, kv_heads=2, head_dim=16, tie_word_embeddings=True, **_TINY),
    "0.6b": _qwen3(hidden=1024, width=3072, layers=28, heads=16, kv_heads=8, tie_word_embeddings=True),
    "8b": _qwen3(hidden=4096, width=12_288, layers=36, heads=32, kv_heads=8),
    "32b": _qwen3(hidden=5120, width=25_600, layers=64, heads=64, kv_heads=8),
    "qwen3.5-4b": _qwen3_5(
        hidden=2560, width=9216, layers=32, heads=16, kv_heads=4, head_dim=256, vocab=248_320,
        key_heads=16, value_heads=32, state=128,
    ),
    "nemotron-h-8b": _nemotron_h(
        hidden=4096, width=21_504, heads=32, kv_heads=8, head_dim=128, vocab=131_072,
        pattern="M-M-M-M*-M-M-M-M-M*-M-M-M-M-M*-M-M-M-M-M*-M-M-M-M-M-", mamba_heads=128, head_size=64, state=128,
    ),
    "qwen3-30b-a3b": _qwen3_moe(
        hidden=2048, width=6144, layers=48, heads=32, kv_heads=4, head_dim=128, vocab=151_936,
        experts=128, per_token=8, expert=768,
    ),
    "deepseek-v2-lite": _latent(
        "deepseek_v2", hidden=2048, width=10_944, layers=27, heads=16, kv_heads=16, vocab=102_400,
        query=None, rank=512, key=128, rotary=64, value=128,
        n_routed_experts=64, n_shared_experts=2, num_experts_per_tok=6, expert=1408,
    ),
    "glm-4.7-flash": _latent(
        "glm4_moe_lite", hidden=2048, width=10_240, layers=47, heads=20, kv_heads=20, vocab=154_880,
        query=768, rank=512, key=192, rotary=64, value=256,
        n_routed_experts=64, n_shared_experts=1, num_experts_per_tok=4, expert=1536,
    ),
    "tiny-qwen3.5": _qwen3_5(layers=4, kv_heads=2, head_dim=16, key_heads=2, value_heads=4, state=16, **_TINY),
    "tiny-nemotron-h": _nemotron_h(
        pattern="M*-M", kv_heads=2, head_dim=16, mamba_heads=4, head_size=32, state=16, **_TINY
    ),
    "tiny-a3b": _qwen3_moe(layers=2, kv_heads=2, head_dim=16, experts=8, per_token=2, expert=64, **_TINY),
    "tiny-v2-lite": _latent(
        "deepseek_v2", layers=2, kv_heads=4, query=None, rank=16, key=16, rotary=8, value=16,
        n_routed_experts=8, n_shared_experts=1, num_experts_per_tok=2, expert=64, **_TINY,
    ),
}  # fmt: skip
"""Qwen3, Qwen3.5, Nemotron-H, DeepSeek-V2-Lite and GLM-4.7-Flash as published, and models of a few hundred thousand
parameters that a CPU updates in a second."""


def known_name(name: str) -> str | None:
    """The key in `MODEL_SIZES` of a name such as 8b, qwen3-8b or Qwen3-8B; None if there is none."""
    lower = name.lower()
    return next((key for key in (lower, lower.removeprefix("qwen3-")) if key in MODEL_SIZES), None)


def full_name(key: str) -> str:
    """The name of a key of `MODEL_SIZES` in results: qwen3-8b for 8b."""
    return f"qwen3-{key}" if MODEL_SIZES[key].config["model_type"] == "qwen3" else key
