"""The MLP in tiles of tokens has the gradient of the MLP over all tokens, float32 to 1e-5, and less memory."""

import pytest
import torch
from measured_models import KINDS, build, gradients, hostile_rows

from tree_rl.models.tiled_mlp import tileable_layers
from tree_rl.training.memory.measures import MemoryMeasures
from tree_rl.tree.forest import Forest

UNIQUE = Forest.from_rows(hostile_rows()).num_unique


def assert_close(got: dict[str, torch.Tensor], expected: dict[str, torch.Tensor]) -> None:
    assert got.keys() == expected.keys()
    largest = max(float(gradient.norm()) for gradient in expected.values())
    for name, reference in expected.items():
        error, norm = float((got[name] - reference).norm()), float(reference.norm())
        assert error <= 1e-5 * max(norm, 1e-2 * largest), (name, error, norm)


@pytest.mark.parametrize("tile_tokens", [1, 3, 64, UNIQUE, UNIQUE + 1])
@pytest.mark.parametrize("kind", KINDS)
def test_tiles_have_the_gradient_of_the_whole(kind: str, tile_tokens: int) -> None:
    model = build(kind)
    whole = gradients(model, MemoryMeasures())
    assert_close(gradients(model, MemoryMeasures(tile_tokens=tile_tokens)), whole)
    if tile_tokens == 3:
        both = MemoryMeasures(tile_tokens=3, offloaded_layers=2)
        assert_close(gradients(model, both, max_tokens=20), whole)
        assert_close(gradients(build(kind, checkpointing=False), MemoryMeasures(tile_tokens=3)), whole)


def test_layers_with_experts_are_left_alone() -> None:
    assert len(tileable_layers(build("experts"))) == 1
    assert len(tileable_layers(build("lora"))) == len(tileable_layers(build("gated_delta_net"))) == 4
