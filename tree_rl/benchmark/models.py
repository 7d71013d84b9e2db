"""A random Qwen3 that reads trees and packed rows, and its optimizer: the same objects for both sides."""

from typing import Any

import torch
from transformers import AutoModelForCausalLM, Qwen3Config

from tree_rl.benchmark.model_sizes import ModelSize
from tree_rl.benchmark.packed_attention import register_packed_attention
from tree_rl.models import use_tree_attention


def build_model(
    size: ModelSize,
    *,
    device: torch.device,
    dtype: torch.dtype,
    tree_attention: str = "auto",
    packed_attention: str = "auto",
    checkpointing: bool = True,
    seed: int = 0,
) -> Any:
    """A model with random weights in train mode.

    Args:
        size: of the model.
        device: where it is made.
        dtype: of parameters and activations.
        tree_attention: implementation of `tree_kernels.tree_attention` for calls with a tree.
        packed_attention: implementation of `packed_attention` for calls with packed rows.
        checkpointing: recompute every layer in the backward.
        seed: of the weights.
    """
    torch.manual_seed(seed)
    name = register_packed_attention(packed_attention)
    with device:
        model = AutoModelForCausalLM.from_config(Qwen3Config(**size.config()), attn_implementation=name, dtype=dtype)
    if checkpointing:
        model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
    use_tree_attention(model, impl=tree_attention)
    return model.train()


def build_optimizer(model: Any, *, lr: float) -> torch.optim.Optimizer:
    """AdamW, one fused kernel where there is one."""
    return torch.optim.AdamW(model.parameters(), lr=lr, weight_decay=0.0, fused=True)
