"""Bytes alive on a chain of partitions grow with its depth, not with the square of it; so do ways to save memory."""

from functools import partial

import numpy as np
import torch
from live_bytes import LiveBytes, peak_bytes
from measured_models import HIDDEN, LAYERS, VOCAB, build, gradients

from tree_rl.cost.memory.model import MemorySaving
from tree_rl.training.memory.host_slab import host_slab
from tree_rl.training.memory.offloaded_inputs import OffloadedInputs

TOKENS = 8
"""Of a partition."""


def chain(depth: int) -> list[list[int]]:
    return [np.random.default_rng(depth).integers(1, VOCAB, depth * TOKENS).tolist()]


def test_a_chain_of_partitions_needs_memory_in_proportion_to_its_depth() -> None:
    model = build("dense")
    gradients(model, MemorySaving(), max_tokens=TOKENS, rows=chain(2))
    runs = (partial(gradients, model, MemorySaving(), max_tokens=TOKENS, rows=chain(d)) for d in (8, 20))
    shallow, deep = map(peak_bytes, runs)
    print(f"peak KiB: {shallow / 1024:.0f}, 2.5 times as deep {deep / 1024:.0f}")
    # Copies of the past, one for each partition, made it three times as much.
    assert deep < 2 * shallow


def test_offloaded_inputs_are_not_alive() -> None:
    """Behind the forward exactly the inputs of the offloaded layers are missing."""
    model, slab, ids = build("dense"), host_slab(torch.device("cpu")), torch.ones(1, 64, dtype=torch.int64)
    alive = []
    for layers in (LAYERS, 0, 2, LAYERS):
        with LiveBytes(slab) as counted, OffloadedInputs(model, layers=layers, live_tokens=64).of_forward():
            hidden = model.model(ids, use_cache=False).last_hidden_state
        alive.append(counted.alive)
        hidden.sum().backward()
    one_input = 64 * HIDDEN * 4
    assert [alive[1] - alive[n] for n in (2, 3)] == [2 * one_input, LAYERS * one_input]
