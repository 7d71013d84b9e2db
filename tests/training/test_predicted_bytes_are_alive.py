"""Bytes alive in a forward and backward are within 10 % of what the memory model predicts, on the device and the host.

Gradients exist beforehand, as in any update but the first. Sizes are such that activations outweigh what is fixed.
"""

from typing import Any

import pytest
import torch
from larger_models import BF16, CPU, F32, build, rows_of
from live_bytes import peak_bytes
from measured_models import measured_step

from tree_rl.cost.memory.model import MemoryModel, MemorySaving
from tree_rl.training import Rows, TreeOptions
from tree_rl.training.memory.host_slab import host_slab
from tree_rl.training.memory.memory_of_module import read_memory_model
from tree_rl.training.micro_batch import MicroBatch, predicted_peak

KEEP_ALL = MemorySaving()


def measure(model: Any, shape: str, saving: MemorySaving, max_tokens: int | None) -> tuple[int, list[MicroBatch]]:
    """One update, gradients of an earlier one being there."""
    for parameter in model.parameters():
        parameter.grad = torch.zeros_like(parameter)
    step = measured_step(model, TreeOptions(mode="tree", max_tokens=max_tokens), saving)
    rows = Rows.of(rows_of(shape))

    batches: list[MicroBatch] = []

    def update() -> None:
        result = step.run(rows, lambda outputs, members: (outputs["log_probs"].sum(), {}), is_separable=True)
        batches[:] = result.micro_batches

    return peak_bytes(update, host_slab(CPU)), batches


def assert_predicted(model: Any, shape: str, saving: MemorySaving, max_tokens: int | None) -> None:
    alive, batches = measure(model, shape, saving, max_tokens)
    memory = read_memory_model(model, dtype=model.dtype, device=CPU)
    assert isinstance(memory, MemoryModel)
    predicted = predicted_peak(batches, memory)
    assert predicted.device == pytest.approx(alive, rel=0.1), predicted.device / alive
    host = host_slab(CPU).num_bytes if saving.offloaded_layers else 0
    assert predicted.host == pytest.approx(host, rel=0.1)


@pytest.mark.parametrize(
    ("kind", "checkpointing", "dtype", "shape"),
    [
        ("dense", True, BF16, "bush"),
        ("dense", False, F32, "bush"),
        ("experts", False, BF16, "trunk"),
    ],
)
def test_of_a_whole_forest(kind: str, checkpointing: bool, dtype: torch.dtype, shape: str) -> None:
    assert_predicted(build(kind, checkpointing=checkpointing, dtype=dtype), shape, KEEP_ALL, None)


@pytest.mark.parametrize(
    ("checkpointing", "shape", "max_tokens"),
    [(True, "trunk", 100), (True, "bush", 200), (False, "comb", 200)],
)
def test_of_partitions(checkpointing: bool, shape: str, max_tokens: int) -> None:
    assert_predicted(build("dense", checkpointing=checkpointing, dtype=F32), shape, KEEP_ALL, max_tokens)


@pytest.mark.parametrize(
    ("max_tokens", "saving"),
    [
        (None, MemorySaving(offloaded_layers=3)),
        (None, MemorySaving(tile_tokens=64)),
        (200, MemorySaving(offloaded_layers=4, tile_tokens=64)),
    ],
)
def test_of_inputs_on_the_host_and_tiles(max_tokens: int | None, saving: MemorySaving) -> None:
    assert_predicted(build("dense", checkpointing=True, dtype=F32), "trunk", saving, max_tokens)
