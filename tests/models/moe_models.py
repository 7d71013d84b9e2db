"""Tiny Mixture-of-Experts models of every family, and routes of rows through them."""

import copy
from collections.abc import Sequence
from functools import partial

import equal_gradients
import numpy as np
import stock_routers
import torch
from latent_models import latent_configs
from stock_routers import PER_TOKEN
from tiny_sizes import DELTA_NET, ROPE, config_of, sizes
from transformers import AutoModelForCausalLM, PretrainedConfig

from tree_rl.models import use_tree_attention
from tree_rl.models.routers.trace import RouterHooks

LAYERS, EXPERTS = 3, 5
# With 0.3 gradients of rows alone move beyond the tolerance when weights move by one unit in the last place.
IDS = {"bos_token_id": 1, "eos_token_id": 2}
SIZES = sizes(
    intermediate_size=24, num_hidden_layers=LAYERS, attention_dropout=0.0, num_experts_per_tok=PER_TOKEN, **IDS
)
SPARSE = {"num_experts": EXPERTS, "moe_intermediate_size": 16}
HYBRID = {**SIZES, **SPARSE, **DELTA_NET, "shared_expert_intermediate_size": 16, "initializer_range": 0.1}
HYBRID |= {"layer_types": ["linear_attention", "linear_attention", "full_attention"]}
FAMILIES: dict[str, PretrainedConfig] = {
    "qwen3_moe": config_of("qwen3_moe", **SIZES, **SPARSE, norm_topk_prob=True),
    "qwen3_moe_dense_layer": config_of("qwen3_moe", **SIZES, **SPARSE, mlp_only_layers=[1]),
    "qwen2_moe": config_of("qwen2_moe", **SIZES, **SPARSE, shared_expert_intermediate_size=16),
    "mixtral": config_of("mixtral", **SIZES, num_local_experts=EXPERTS, sliding_window=7),
    "gpt_oss": config_of("gpt_oss", **SIZES, sliding_window=5, num_local_experts=EXPERTS, rope_parameters=ROPE),
    "olmoe": config_of("olmoe", **SIZES, num_experts=EXPERTS),
    "qwen3_next": config_of("qwen3_next", **HYBRID),
    "qwen3_5_moe": config_of("qwen3_5_moe_text", **HYBRID),
}
BIASED = config_of(
    "glm4_moe", **SIZES, n_routed_experts=EXPERTS, moe_intermediate_size=16, n_shared_experts=1, first_k_dense_replace=1
)
"""Balances its experts by a bias, without an auxiliary loss."""
LATENT = latent_configs(num_hidden_layers=LAYERS, **IDS)
"""Multi-head latent attention."""
REPLAYABLE = {
    **FAMILIES,
    "glm4_moe": BIASED,
    **{family: LATENT[family] for family in ("deepseek_v2", "deepseek_v3", "glm4_moe_lite")},
}
"""Families whose routes can be replayed."""
LAYERS_WITH_EXPERTS: dict[str, Sequence[int]] = {
    **dict.fromkeys(FAMILIES, range(LAYERS)),
    **dict.fromkeys(REPLAYABLE.keys() - FAMILIES, (1, 2)),
    "qwen3_moe_dense_layer": (0, 2),
}
random_routes = partial(stock_routers.random_routes, layers=LAYERS, experts=EXPERTS)


def build(
    config: PretrainedConfig, *, experts: str = "eager", attention: str = "eager", dtype: torch.dtype = torch.float32
) -> torch.nn.Module:
    torch.manual_seed(0)
    # Models built from one config object would share it, and with it the attention implementation.
    config = copy.deepcopy(config)
    model = AutoModelForCausalLM.from_config(config, attn_implementation=attention, experts_implementation=experts)
    for name, tensor in [*model.named_parameters(), *model.named_buffers()]:
        if name.endswith(("sinks", "e_score_correction_bias", "router.bias")):
            torch.nn.init.normal_(tensor, std=0.3)
        if name.endswith("A_log"):
            # States decay slowly: stock's float32 sums of large decays are no yardstick.
            torch.nn.init.uniform_(tensor, -4.0, -1.0)
    return model.to(dtype).eval()


def prepared(family: str, *, checkpointing: bool = False) -> tuple[torch.nn.Module, RouterHooks]:
    """A model that reads trees; with checkpoints it trains."""
    model = build(REPLAYABLE[family])
    if checkpointing:
        model.train().gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
    use_tree_attention(model)
    return model, RouterHooks(model)


def assert_equal_gradients(
    got: dict[str, torch.Tensor], expected: dict[str, torch.Tensor], tolerance: float = 1e-5
) -> None:
    assert any(gradient.any() for gradient in expected.values())
    equal_gradients.assert_equal_gradients(got, expected, tolerance, slack=4)


def weighted(log_probs_F: torch.Tensor, seed: int = 0) -> torch.Tensor:
    weight_F = np.random.default_rng(seed).normal(size=len(log_probs_F))
    # Half of the tokens are context.
    weight_F[1::2] = 0
    return (log_probs_F * torch.from_numpy(weight_F).to(log_probs_F)).sum()
