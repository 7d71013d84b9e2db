"""Partitions on a GPU: close to the whole tree, offloaded keys and values bitwise the same, memory bounded by C."""

from typing import Any

import numpy as np
import pytest
import torch
from partitioned_steps import partitioned_gradients
from tiny_sizes import sizes
from transformers import AutoModelForCausalLM, Qwen3Config

from tree_rl.models import use_tree_attention
from tree_rl.tree.forest import Forest

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")]

CUDA = torch.device("cuda")
VOCAB = 512


def build(dtype: torch.dtype, *, deterministic: bool = False) -> Any:
    torch.manual_seed(0)
    wide = {"hidden_size": 256, "intermediate_size": 512, "num_hidden_layers": 4, "head_dim": 64}
    length = {"max_position_embeddings": 8192, "pad_token_id": None, "initializer_range": None}
    config = Qwen3Config(**sizes(vocab_size=VOCAB, **wide, **length, tie_word_embeddings=True))
    model = AutoModelForCausalLM.from_config(config, attn_implementation="sdpa").to(CUDA, dtype).train()
    use_tree_attention(model, deterministic=deterministic)
    return model


def bushy_rows(branches: int) -> list[np.ndarray]:
    draw = np.random.default_rng(0)
    trunk = draw.integers(1, VOCAB, 700)
    middle = [np.concatenate([trunk, draw.integers(1, VOCAB, 300)]) for _ in range(3)]
    return [np.concatenate([middle[i % 3], draw.integers(1, VOCAB, 200)]) for i in range(branches)]


def step(model: Any, forest: Forest, capacity: int, *, offload: bool = False) -> tuple[dict[str, torch.Tensor], int]:
    """Gradients of the mean negative log-prob, and the peak of allocated memory above the start."""
    model.zero_grad()
    torch.cuda.synchronize()
    before = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    gradients = partitioned_gradients(
        model, forest, capacity, lambda log_probs_F: -log_probs_F.mean(), relays_on_host=offload, device=CUDA
    )
    return gradients, torch.cuda.max_memory_allocated() - before


def error(got: dict[str, torch.Tensor], truth: dict[str, torch.Tensor]) -> float:
    off = sum(float((got[n].float() - g.float()).square().sum()) for n, g in truth.items())
    return (off / sum(float(g.float().square().sum()) for g in truth.values())) ** 0.5


def test_bfloat16_partitions_are_as_close_to_float32_as_the_whole_tree() -> None:
    forest = Forest.from_rows(bushy_rows(12))
    exact = build(torch.float32)
    truth, _ = step(exact, forest, forest.num_unique)
    assert error(step(exact, forest, 256)[0], truth) < 1e-5
    model = build(torch.bfloat16)
    whole, cut = (error(step(model, forest, capacity)[0], truth) for capacity in (forest.num_unique, 900))
    print(f"bf16 gradient error: whole tree {whole:.4f}, partitions {cut:.4f}")
    assert cut < 1.2 * whole


def test_offloaded_keys_and_values_change_no_bit() -> None:
    model = build(torch.bfloat16, deterministic=True)
    forest = Forest.from_rows(bushy_rows(12))
    stay, _ = step(model, forest, 900)
    leave, _ = step(model, forest, 900, offload=True)
    for name, gradient in stay.items():
        assert torch.equal(gradient, leave[name]), name


def test_memory_of_bushy_trees_does_not_grow_with_the_tree() -> None:
    model = build(torch.bfloat16)
    small, large = (step(model, Forest.from_rows(bushy_rows(branches)), 1500)[1] for branches in (24, 240))
    print(f"peak MiB: 24 branches {small / 2**20:.0f}, 240 branches {large / 2**20:.0f}")
    assert large < 1.15 * small
