"""A random model that reads both trees and packed rows. Legend: F packed tokens, H heads, D head size."""

import copy
from functools import partial
from typing import Any

import torch
from transformers import AutoConfig, AutoModelForCausalLM
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from tree_kernels.tree_gated_delta_rule.triton_kernels.sizes import triton_unavailable_reason
from tree_rl.benchmark.against_packed.packed_attention import PackedLayout, packed_attention
from tree_rl.cost.cost_model import ModelShape
from tree_rl.cost.model_sizes import ModelSize
from tree_rl.models import use_edge_head, use_tree_attention
from tree_rl.models.fused_layers import remove_liger_layers, use_liger_layers
from tree_rl.models.recurrent.delta_net import tree_functions
from tree_rl.models.recurrent.layers import GATED_DELTA_NET, MAMBA_2, replace_during_trees
from tree_rl.models.recurrent.mamba_2 import tree_forward
from tree_rl.models.routers.trace import RouterHooks

YARDSTICK = {torch.bfloat16: torch.float32, torch.float16: torch.float32, torch.float32: torch.float64}
"""Type of the model -> the higher precision it is compared with."""
STATES = {
    "qwen3_5_text": ("linear_key_head_dim", "linear_value_head_dim"),
    "nemotron_h": ("ssm_state_size", "mamba_head_dim"),
}
"""Keys of the sizes of a recurrent layer's state, by model type."""
PACKED_LINEAR_ATTENTION = "tree kernels, rows apart"
"""What recurrent layers run over packed rows: transformers' own functions would carry the state from row to row.
flash-linear-attention takes longer for forward and backward together (docs/benchmarks/kernels.md)."""


def build_model(
    size: ModelSize,
    *,
    device: torch.device,
    dtype: torch.dtype,
    tree_impl: str = "auto",
    packed_impl: str = "auto",
    checkpointing: bool = True,
    liger: bool = False,
) -> Any:
    """A model with random weights, always the same, in train mode; options as in `BenchOptions`."""
    torch.manual_seed(0)
    config = AutoConfig.for_model(**size.config)
    attention = register_packed_attention(packed_impl)
    with device:
        model = AutoModelForCausalLM.from_config(config, attn_implementation=attention, dtype=dtype)
    if liger:
        use_liger_layers(model, device=device)
    if checkpointing:
        model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
    recurrence = recurrence_implementation(size, device, dtype) or "auto"
    use_tree_attention(model, impl=tree_impl, delta_rule_impl=recurrence, state_space_impl=recurrence)
    replace_during_trees(model, GATED_DELTA_NET, _packed_linear_attention, keyword="packed_layout")
    replace_during_trees(model, MAMBA_2, partial(_packed_state_space, impl=recurrence), keyword="packed_layout")
    use_edge_head(model)
    if has_experts(model):
        RouterHooks(model)
    return model.train()


def recurrence_implementation(size: ModelSize, device: torch.device, dtype: torch.dtype) -> str:
    """What trees and packed rows run in recurrent layers, Triton wherever it can; empty if the model has none."""
    keys = STATES.get(size.config["model_type"])
    if keys is None:
        return ""
    state, head = (size.config[key] for key in keys)
    return "chunked" if triton_unavailable_reason(device, dtype, state, head) else "triton"


def has_experts(model: Any) -> bool:
    """True if a model that `build_model` made has experts."""
    return ModelShape.from_config(model.config.to_dict()).active_experts > 0


def in_higher_precision(model: Any) -> Any:
    """A copy in float32 (float64 of a float32 model) with transformers' layers and torch's own attention."""
    wide = copy.deepcopy(model).to(YARDSTICK[next(model.parameters()).dtype])
    remove_liger_layers(wide)
    wide.set_attn_implementation(register_packed_attention("sdpa"))
    if has_experts(wide):
        # The grouped kernels are made for half precision.
        wide.set_experts_implementation("eager")
    return wide


def build_optimizer(model: Any, *, lr: float) -> torch.optim.Optimizer:
    """AdamW, one fused kernel where there is one."""
    return torch.optim.AdamW(model.parameters(), lr=lr, weight_decay=0.0, fused=True)


def register_packed_attention(impl: str) -> str:
    """Register an implementation of `packed_attention` with transformers and return the name it has there."""
    name = f"tree_rl_packed_{impl}"
    ALL_ATTENTION_FUNCTIONS.register(name, partial(_attention_forward, impl=impl))
    return name


def _attention_forward(
    module: Any, *tensors_1HFD: torch.Tensor | None, packed_layout: PackedLayout, impl: str, **kwargs: Any
) -> tuple[torch.Tensor, None]:
    """What transformers calls with queries, keys, values and a mask; the result is [1, F, H, D], D of the values."""
    q_FHD, k_FHD, v_FHD = (t[0].transpose(0, 1) for t in tensors_1HFD[:3] if t is not None)
    return packed_attention(q_FHD, k_FHD, v_FHD, packed_layout, scale=kwargs.get("scaling"), impl=impl)[None], None


def _packed_linear_attention(mixer: Any, layout: PackedLayout, *_: object) -> dict[str, Any]:
    return tree_functions(mixer, layout.rows_apart, None, None, impl="auto")


def _packed_state_space(mixer: Any, layout: PackedLayout, *_: object, impl: str) -> dict[str, Any]:
    return {"forward": partial(tree_forward, mixer, layout.rows_apart, None, None, impl=impl)}
