"""What a step has made is freed when it ends, not when Python's garbage collector finds it: on a GPU that may be after
the next step's peak."""

import gc
from collections.abc import Iterator

import pytest
from live_bytes import LiveBytes
from measured_models import KINDS, build, gradients, hostile_rows

from tree_rl.cost.memory.model import MemorySaving

WAYS = {
    "whole": (None, MemorySaving()),
    "offloaded and tiled": (None, MemorySaving(offloaded_layers=3, tile_tokens=16)),
    "partitions": (16, MemorySaving()),
    "partitions, relays on the host": (16, MemorySaving(relays_on_host=True)),
}


@pytest.fixture
def _collector_waits() -> Iterator[None]:
    gc.collect()
    gc.disable()
    yield
    gc.enable()


@pytest.mark.usefixtures("_collector_waits")
@pytest.mark.parametrize(
    ("kind", "way"),
    [*((kind, "partitions") for kind in KINDS), *(("dense", way) for way in WAYS if way != "partitions")],
)
def test_the_collector_finds_no_tensor(kind: str, way: str) -> None:
    max_tokens, saving = WAYS[way]
    model = build(kind)
    gc.collect()
    with LiveBytes() as counted:
        gradients(model, saving, max_tokens=max_tokens, rows=hostile_rows()[-5:])
    left = counted.alive
    gc.collect()
    assert left - counted.alive == 0
