"""Bytes alive in a forward and backward are within 10 % of what the memory model predicts, on the device and the host.

Gradients exist beforehand, as in any update but the first. Sizes are such that activations outweigh what is fixed.
"""

from typing import Any

import numpy as np
import pytest
import torch
from live_bytes import peak_bytes
from measured_models import measured_step
from transformers import AutoModelForCausalLM, Qwen3Config, Qwen3MoeConfig

from tree_rl.cost.memory.measures import MemoryMeasures
from tree_rl.cost.memory.model import MemoryModel
from tree_rl.models import use_edge_head, use_tree_attention
from tree_rl.training import Rows, TreeOptions
from tree_rl.training.memory.host_slab import host_slab
from tree_rl.training.memory.reading import read_memory_model
from tree_rl.training.micro_batch import MicroBatch, predicted_peak

CPU = torch.device("cpu")
SIZES: dict[str, Any] = {
    "vocab_size": 500,
    "hidden_size": 128,
    "intermediate_size": 384,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 32,
    "max_position_embeddings": 4096,
    "attention_dropout": 0.0,
    "tie_word_embeddings": False,
}
EXPERTS = {"num_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": 96, "norm_topk_prob": True}
KEEP_ALL = MemoryMeasures()


def build(kind: str, *, checkpointing: bool, dtype: torch.dtype) -> Any:
    torch.manual_seed(0)
    config: Any = Qwen3Config(**SIZES) if kind == "dense" else Qwen3MoeConfig(**SIZES, **EXPERTS)
    model: Any = AutoModelForCausalLM.from_config(config, attn_implementation="sdpa", dtype=dtype)
    if checkpointing:
        model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
    use_tree_attention(model)
    use_edge_head(model)
    return model.train()


def rows_of(shape: str) -> list[np.ndarray]:
    """A long trunk with two branches, a comb with a tooth at every fifth of its spine, a bush of ten branches."""
    draw = np.random.default_rng(0)
    trunk_tokens, branches, tokens = {"trunk": (500, 2, 75), "comb": (500, 5, 60), "bush": (100, 8, 75)}[shape]
    trunk = draw.integers(1, 400, trunk_tokens)
    starts = [trunk_tokens * (i + 1) // branches if shape == "comb" else trunk_tokens for i in range(branches)]
    return [np.concatenate([trunk[:s], [400 + i], draw.integers(1, 400, tokens - 1)]) for i, s in enumerate(starts)]


def measure(model: Any, shape: str, measures: MemoryMeasures, max_tokens: int | None) -> tuple[int, list[MicroBatch]]:
    """One update, gradients of an earlier one being there."""
    for parameter in model.parameters():
        parameter.grad = torch.zeros_like(parameter)
    step = measured_step(model, TreeOptions(mode="tree", max_tokens=max_tokens), measures)
    rows = Rows.of(rows_of(shape))

    batches: list[MicroBatch] = []

    def update() -> None:
        result = step.run(rows, lambda outputs, members: (outputs["log_probs"].sum(), {}), is_separable=True)
        batches[:] = result.micro_batches

    return peak_bytes(update, host_slab(CPU)), batches


def assert_predicted(model: Any, shape: str, measures: MemoryMeasures, max_tokens: int | None) -> None:
    alive, batches = measure(model, shape, measures, max_tokens)
    memory = read_memory_model(model, dtype=model.dtype, device=CPU)
    assert isinstance(memory, MemoryModel)
    predicted = predicted_peak(batches, memory)
    assert predicted.device == pytest.approx(alive, rel=0.1), predicted.device / alive
    host = host_slab(CPU).num_bytes if measures.offloaded_layers else 0
    assert predicted.host == pytest.approx(host, rel=0.1)


F32, BF16 = torch.float32, torch.bfloat16


@pytest.mark.parametrize(
    ("kind", "checkpointing", "dtype", "shape"),
    [
        ("dense", True, F32, "trunk"),
        ("dense", True, BF16, "bush"),
        ("dense", False, F32, "bush"),
        ("experts", True, F32, "bush"),
        ("experts", False, BF16, "trunk"),
    ],
)
def test_of_a_whole_forest(kind: str, checkpointing: bool, dtype: torch.dtype, shape: str) -> None:
    assert_predicted(build(kind, checkpointing=checkpointing, dtype=dtype), shape, KEEP_ALL, None)


@pytest.mark.parametrize(
    ("checkpointing", "shape", "max_tokens"),
    [(True, "trunk", 100), (True, "comb", 200), (True, "bush", 200), (False, "comb", 200)],
)
def test_of_partitions(checkpointing: bool, shape: str, max_tokens: int) -> None:
    assert_predicted(build("dense", checkpointing=checkpointing, dtype=F32), shape, KEEP_ALL, max_tokens)


@pytest.mark.parametrize(
    ("max_tokens", "measures"),
    [
        (None, MemoryMeasures(offloaded_layers=3)),
        (200, MemoryMeasures(offloaded_layers=4)),
        (None, MemoryMeasures(tile_tokens=64)),
        (200, MemoryMeasures(offloaded_layers=4, tile_tokens=64)),
    ],
)
def test_of_inputs_on_the_host_and_tiles(max_tokens: int | None, measures: MemoryMeasures) -> None:
    assert_predicted(build("dense", checkpointing=True, dtype=F32), "trunk", measures, max_tokens)
