"""Sizes of models by name, for predictions and for benchmarks with random weights."""

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Literal

from tree_rl.cost.cost_model import LatentRanks, ModelShape, mean_mlp_width
from tree_rl.cost.hybrid_layers import PATTERN

Family = Literal["qwen3", "qwen3_moe", "qwen3_5", "deepseek_v2", "glm4_moe_lite", "nemotron_h"]


@dataclass(frozen=True, kw_only=True, slots=True)
class ModelSize:
    """What a model's config needs to know."""

    shape: ModelShape
    """Sizes that decide the cost."""
    tied: bool
    """True if head and embedding are one matrix, as published."""
    family: Family = "qwen3"
    """Family whose transformers config describes the model."""
    attention_every: int = 1
    """One layer in this many has attention; the others are Gated DeltaNets."""
    pattern: str = ""
    """Kinds of all layers as in Nemotron-H's `hybrid_override_pattern`; empty for other families."""
    more: Mapping[str, int | bool | str | None] = field(default_factory=dict)
    """Entries of the config that the family adds to those of Qwen3."""

    def with_layers(self, layers: int | None) -> "ModelSize":
        """The same model with another number of layers; None keeps it."""
        layers = layers or self.shape.layers
        if self.pattern:
            fewer = replace(self, pattern=self.pattern[:layers])
            return replace(fewer, shape=ModelShape.from_config(fewer.config()))
        with_attention = None if self.attention_every == 1 else layers // self.attention_every
        size = replace(self, shape=replace(self.shape, layers=layers, attention_layers=with_attention))
        # The first layers of some models have no experts.
        width = mean_mlp_width(size.config(), size.shape.active_experts)
        return replace(size, shape=replace(size.shape, intermediate=width))

    def config(self) -> dict[str, object]:
        """Keyword arguments of the family's config."""
        return {
            "hidden_size": self.shape.hidden,
            "intermediate_size": self.shape.intermediate,
            "num_hidden_layers": self.shape.layers,
            "num_attention_heads": self.shape.heads,
            "num_key_value_heads": self.shape.kv_heads,
            # Latent attention has sizes of its own, in `more`.
            **({"head_dim": self.shape.head_dim} if self.shape.latent is None else {}),
            "vocab_size": self.shape.vocab,
            "max_position_embeddings": 131_072,
            "tie_word_embeddings": self.tied,
            **({"layers_block_type": [PATTERN[kind] for kind in self.pattern]} if self.pattern else {}),
            **self.more,
        }


def _hybrid(shape: ModelShape, *, key_heads: int, value_heads: int, state: int) -> ModelSize:
    """Qwen3.5: every fourth layer has attention."""
    more = {"linear_num_key_heads": key_heads, "linear_num_value_heads": value_heads}
    more |= {"linear_key_head_dim": state, "linear_value_head_dim": state}
    size = ModelSize(shape=shape, tied=True, family="qwen3_5", attention_every=4, more=more)
    return size.with_layers(shape.layers)


def _sparse(shape: ModelShape, *, experts: int, per_token: int) -> ModelSize:
    """Qwen3-MoE; `shape.intermediate` is the width of all experts that a token visits."""
    more = {"num_experts": experts, "num_experts_per_tok": per_token, "norm_topk_prob": True}
    more["moe_intermediate_size"] = shape.intermediate // per_token
    shape = replace(shape, active_experts=per_token)
    return ModelSize(shape=shape, tied=False, family="qwen3_moe", more=more)


def _latent(shape: ModelShape, *, dense: int, expert: int, experts: int, shared: int, family: Family) -> ModelSize:
    """Multi-head latent attention and experts; `dense` is the width of the first layer, which has no experts."""
    assert shape.latent is not None
    more: dict[str, int | bool | None] = {
        "q_lora_rank": shape.latent.query,
        "kv_lora_rank": shape.latent.key_value,
        "qk_nope_head_dim": shape.head_dim - shape.latent.rotary,
        "qk_rope_head_dim": shape.latent.rotary,
        "v_head_dim": shape.value_size,
    }
    more |= {"intermediate_size": dense, "moe_intermediate_size": expert, "first_k_dense_replace": 1}
    more |= {"n_routed_experts": experts, "n_shared_experts": shared, "num_experts_per_tok": shape.active_experts}
    return ModelSize(shape=shape, tied=False, family=family, more=more).with_layers(shape.layers)


def _nemotron_h(shape: ModelShape, pattern: str, *, mamba_heads: int, head_size: int, state: int) -> ModelSize:
    """Nemotron-H; what the shape says of its layers is read from the pattern."""
    more: dict[str, int | bool | str] = {
        "model_type": "nemotron_h",
        "mamba_num_heads": mamba_heads,
        "mamba_head_dim": head_size,
    }
    more |= {"ssm_state_size": state, "n_groups": min(mamba_heads, 8)}
    size = ModelSize(shape=shape, tied=False, family="nemotron_h", pattern=pattern, more=more)
    return size.with_layers(shape.layers)


QWEN3 = partial(ModelShape, head_dim=128, vocab=151_936)
TINY = ModelShape(hidden=64, layers=2, intermediate=128, heads=4, kv_heads=2, head_dim=16, vocab=512)
SMALL = QWEN3(hidden=1024, intermediate=3072, layers=28, heads=16, kv_heads=8)
MEDIUM = QWEN3(hidden=4096, intermediate=12_288, layers=36, heads=32, kv_heads=8)
LARGE = QWEN3(hidden=5120, intermediate=25_600, layers=64, heads=64, kv_heads=8)
A3B = QWEN3(hidden=2048, intermediate=8 * 768, layers=48, heads=32, kv_heads=4)
HYBRID = ModelShape(hidden=2560, layers=32, intermediate=9216, heads=16, kv_heads=4, head_dim=256, vocab=248_320)
V2_LITE = ModelShape(
    hidden=2048, layers=27, intermediate=8 * 1408, heads=16, kv_heads=16, head_dim=192, value_dim=128, vocab=102_400,
    active_experts=6, latent=LatentRanks(query=None, key_value=512, rotary=64),
)  # fmt: skip
FLASH = ModelShape(
    hidden=2048, layers=47, intermediate=5 * 1536, heads=20, kv_heads=20, head_dim=256, value_dim=256, vocab=154_880,
    active_experts=4, latent=LatentRanks(query=768, key_value=512, rotary=64),
)  # fmt: skip
TINY_LATENT = replace(
    TINY, kv_heads=4, head_dim=24, value_dim=16, active_experts=2,
    latent=LatentRanks(query=None, key_value=16, rotary=8),
)  # fmt: skip
NEMOTRON = ModelShape(hidden=4096, layers=52, intermediate=21_504, heads=32, kv_heads=8, head_dim=128, vocab=131_072)

MODEL_SIZES = {
    "tiny": ModelSize(shape=TINY, tied=True),
    "0.6b": ModelSize(shape=SMALL, tied=True),
    "8b": ModelSize(shape=MEDIUM, tied=False),
    "32b": ModelSize(shape=LARGE, tied=False),
    "qwen3.5-4b": _hybrid(HYBRID, key_heads=16, value_heads=32, state=128),
    "nemotron-h-8b": _nemotron_h(
        NEMOTRON,
        "M-M-M-M*-M-M-M-M-M*-M-M-M-M-M*-M-M-M-M-M*-M-M-M-M-M-",
        mamba_heads=128,
        head_size=64,
        state=128,
    ),
    "qwen3-30b-a3b": _sparse(A3B, experts=128, per_token=8),
    "deepseek-v2-lite": _latent(V2_LITE, dense=10_944, expert=1408, experts=64, shared=2, family="deepseek_v2"),
    "glm-4.7-flash": _latent(FLASH, dense=10_240, expert=1536, experts=64, shared=1, family="glm4_moe_lite"),
    "tiny-qwen3.5": _hybrid(replace(TINY, layers=4), key_heads=2, value_heads=4, state=16),
    "tiny-nemotron-h": _nemotron_h(replace(TINY, layers=4), "M*-M", mamba_heads=4, head_size=32, state=16),
    "tiny-a3b": _sparse(TINY, experts=8, per_token=2),
    "tiny-v2-lite": _latent(TINY_LATENT, dense=128, expert=64, experts=8, shared=1, family="deepseek_v2"),
}
"""Qwen3, Qwen3.5, Nemotron-H, DeepSeek-V2-Lite and GLM-4.7-Flash as published, and models of a few hundred thousand
parameters that a CPU updates in a second."""


def known_name(name: str) -> str | None:
    """The key in `MODEL_SIZES` of a name such as 8b, qwen3-8b or Qwen3-8B; None if there is none."""
    lower = name.lower()
    return next((key for key in (lower, lower.removeprefix("qwen3-")) if key in MODEL_SIZES), None)


def full_name(key: str) -> str:
    """The name of a key of `MODEL_SIZES` in results: qwen3-8b for 8b."""
    return f"qwen3-{key}" if MODEL_SIZES[key].family == "qwen3" else key
