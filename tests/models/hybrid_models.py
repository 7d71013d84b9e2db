"""Tiny models with Gated DeltaNet and attention layers, and stock transformers in float64 as their yardstick."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import pytest
import torch
from tiny_sizes import DELTA_NET, ROPE, VOCAB, config_of, sizes
from transformers import AutoModelForCausalLM, PretrainedConfig

SIZES: dict[str, Any] = sizes(
    num_hidden_layers=4, max_position_embeddings=512, attention_dropout=0.0, initializer_range=0.06, **DELTA_NET
)
EXPERTS = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16}
EXPERTS |= {"shared_expert_intermediate_size": 16}
TEXT_MROPE = {**ROPE, "partial_rotary_factor": 0.5, "mrope_section": [1, 1, 0]}
HYBRIDS: dict[str, PretrainedConfig] = {
    "qwen3_next": config_of("qwen3_next", **SIZES, **EXPERTS),
    "qwen3_5": config_of("qwen3_5_text", **SIZES, rope_parameters=TEXT_MROPE),
    "qwen3_5_moe": config_of("qwen3_5_moe_text", **SIZES, **EXPERTS),
}


def build(config: PretrainedConfig, dtype: torch.dtype, *, seed: int = 0) -> Any:
    """A random model in training mode, the same weights in every dtype."""
    torch.manual_seed(seed)
    model = AutoModelForCausalLM.from_config(
        config, attn_implementation="sdpa", experts_implementation="eager", dtype=torch.float32
    )
    return model.to(dtype).train()


@contextmanager
def float64_throughout() -> Iterator[None]:
    """Where the modelling files round to float32 they keep float64, so that a float64 model is one."""

    def wider(value: object) -> object:
        return torch.float64 if value is torch.float32 else value

    def widened(function: Callable[..., Any]) -> Callable[..., Any]:
        return lambda *a, **k: function(*map(wider, a), **{n: wider(v) for n, v in k.items()})

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(torch.Tensor, "float", torch.Tensor.double)
        for owner, name in ((torch.Tensor, "to"), (torch.Tensor, "type"), (torch.Tensor, "softmax")):
            patch.setattr(owner, name, widened(getattr(owner, name)))
        patch.setattr(torch.nn.functional, "softmax", widened(torch.nn.functional.softmax))
        yield


def rows_with_prefix(prefix: int, *, seed: int = 0) -> list[np.ndarray]:
    """Branches at one depth, one of them short, a strict prefix, twins, a row of one token that shares nothing."""
    draw = np.random.default_rng(seed)
    trunk = draw.integers(1, VOCAB - 1, prefix)
    rows = [np.concatenate([trunk, draw.integers(1, VOCAB - 1, more)]) for more in (9, 1, 30)]
    deeper = np.concatenate([rows[2][:-5], draw.integers(1, VOCAB - 1, 6)])
    return [*rows, deeper, trunk, rows[0], np.array([VOCAB - 1])]
