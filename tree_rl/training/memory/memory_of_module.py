"""The memory model of an instantiated module: what its layers save, and in which dtype."""

import math
from dataclasses import replace
from typing import Any

import torch
from torch import nn
from transformers.modeling_layers import GradientCheckpointingLayer

from tree_kernels.edge_log_probs import chosen_implementation
from tree_kernels.edge_log_probs.api import default_chunk_rows
from tree_kernels.tree_attention import chosen_implementation as tree_attention_implementation
from tree_kernels.tree_attention.portable.blocked import BLOCK_TOKENS, DEFAULT_BLOCK_TOKENS
from tree_rl.cost.cost_model import ModelShape
from tree_rl.cost.memory.model import CHUNK_TENSORS, FLOAT32, TRITON_CHUNK_TENSORS, MemoryModel
from tree_rl.models.edge_head import EdgeHead
from tree_rl.models.tiled_mlp import runs_in_tiles


def read_memory_model(
    module: nn.Module, shape: ModelShape | None = None, *, dtype: torch.dtype, device: torch.device
) -> MemoryModel | None:
    """The memory model of a transformers model's forward and backward.

    `shape` None reads the sizes from its config; the result is None if they are missing there.
    """
    shape = _shape_of(module) if shape is None else shape
    if shape is None:
        return None
    modules = list(module.modules())
    layers = [layer for layer in modules if isinstance(layer, GradientCheckpointingLayer)]
    runs_triton = chosen_implementation(device=device, dtype=dtype) == "triton"
    is_chunked = any(isinstance(head, EdgeHead) for head in modules)
    attention = tree_attention_implementation(
        device=device, dtype=dtype, head_size=shape.head_dim, value_size=shape.value_size
    )
    chunk = FLOAT32 * shape.vocab * default_chunk_rows(device, shape.vocab) if is_chunked else math.inf
    return MemoryModel(
        shape=shape,
        value_bytes=dtype.itemsize,
        checkpointing=bool(layers) and all(layer.gradient_checkpointing for layer in layers),
        # On an instantiated layer Liger replaces methods, including _get_name, but not the class.
        fused=any("Liger" in layer._get_name() for layer in modules),
        head_norms=any(name.endswith("q_norm") for name, _ in module.named_modules()),
        logits_bytes=chunk,
        chunk_tensors=TRITON_CHUNK_TENSORS if runs_triton else CHUNK_TENSORS,
        sums_query_gradients=attention == "fa4",
        attention_block=BLOCK_TOKENS.get(device.type, DEFAULT_BLOCK_TOKENS) if attention == "sdpa" else 0,
        # On a CPU, host and device memory are the same.
        offloads=device.type == "cuda",
        tiles=runs_in_tiles(module) and shape.active_experts == 0,
    )


def _shape_of(module: nn.Module) -> ModelShape | None:
    config: Any = getattr(module, "config", None)
    if config is None:
        return None
    try:
        shape = ModelShape.from_config(config.get_text_config().to_dict())
    except ValueError:
        return None
    head_of: Any = getattr(module, "get_output_embeddings", None)
    return shape if head_of is not None and head_of() is not None else replace(shape, vocab=1)
