"""Bytes alive on a chain of partitions grow with its depth, not with the square of it; so do ways to save memory."""

from functools import partial

import numpy as np
from live_bytes import peak_bytes
from measured_models import VOCAB, build, gradients

from tree_rl.cost.memory.model import MemorySaving

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
