"""The MLP in tiles of tokens has the gradient of the MLP over all tokens, float32 to 1e-5, and needs less memory."""

import copy
from collections.abc import Iterator
from functools import partial
from typing import Any

import pytest
import torch
import torch.distributed
from equal_gradients import assert_equal_gradients
from live_bytes import peak_bytes
from measured_models import KINDS, build, gradients, hostile_rows
from torch.distributed.fsdp import fully_shard
from transformers import Qwen3Config
from transformers.models.qwen3.modeling_qwen3 import Qwen3MLP

from tree_rl.cost.memory.model import MemorySaving
from tree_rl.models.tiled_mlp import tileable_layers, tiled
from tree_rl.training.memory.memory_of_module import read_memory_model
from tree_rl.tree.forest import Forest

UNIQUE = Forest.from_rows(hostile_rows()).num_unique


@pytest.mark.parametrize("kind", KINDS)
def test_tiles_have_the_gradient_of_the_whole(kind: str) -> None:
    model = build(kind)
    # Layers with experts are left alone.
    assert len(tileable_layers(model)) == (1 if kind == "experts" else 4)
    whole = gradients(model, MemorySaving())
    for tile_tokens in (1, UNIQUE + 1) if kind == "dense" else (16,):
        assert_equal_gradients(gradients(model, MemorySaving(tile_tokens=tile_tokens)), whole)
    both = MemorySaving(tile_tokens=3, offloaded_layers=2)
    assert_equal_gradients(gradients(model, both, max_tokens=20), whole)
    assert_equal_gradients(gradients(build(kind, checkpointing=False), MemorySaving(tile_tokens=3)), whole)


def test_recomputing_a_layer_stops_in_front_of_its_tiles() -> None:
    """Each token passes the MLP's first projections twice, as without tiles: forward, and backward of its tile."""
    model = build("dense")
    passed: list[int] = []
    for layer in model.model.layers:
        layer.mlp.up_proj.register_forward_hook(lambda module, args, out: passed.append(args[0].shape[1]))
    for tile_tokens in (None, 7):
        passed.clear()
        gradients(model, MemorySaving(tile_tokens=tile_tokens))
        assert sum(passed) == 2 * len(model.model.layers) * UNIQUE
    assert max(passed) == 7


def mlp_and_input(dtype: torch.dtype = torch.float32) -> tuple[Any, torch.Tensor]:
    torch.manual_seed(0)
    mlp = Qwen3MLP(Qwen3Config(hidden_size=16, intermediate_size=256)).to(dtype)
    return mlp, torch.randn(1, 512, 16).to(dtype).requires_grad_()


def run(mlp: Any, x: torch.Tensor, tile_tokens: int | None) -> list[torch.Tensor]:
    mlp.zero_grad()
    x.grad = None
    out = mlp(x) if tile_tokens is None else tiled(mlp, mlp.forward, tile_tokens, x)
    out.float().square().mean().backward()
    return [x.grad, *(parameter.grad for parameter in mlp.parameters() if parameter.grad is not None)]


def test_tiles_need_the_memory_of_one() -> None:
    mlp, x = mlp_and_input()
    whole, in_tiles = (peak_bytes(partial(run, mlp, x, tile_tokens)) for tile_tokens in (None, 32))
    print(f"peak KiB: whole {whole / 1024:.0f}, tiles {in_tiles / 1024:.0f}")
    assert in_tiles < 0.25 * whole


def test_weight_gradients_are_summed_in_float32() -> None:
    """bf16 tiles of one token stay as close to float32 as the MLP over all tokens."""
    mlp, x = mlp_and_input(torch.bfloat16)
    wide = copy.deepcopy(mlp).float()
    truth = run(wide, x.detach().float().requires_grad_(), None)

    def error(got: list[torch.Tensor]) -> float:
        return max(float((a.float() - b).norm() / b.norm()) for a, b in zip(got, truth, strict=True))

    whole, in_tiles = error(run(mlp, x, None)), error(run(mlp, x, 1))
    assert in_tiles < 1.2 * whole


def test_autocast_reaches_the_backward_of_tiles() -> None:
    mlp, x = mlp_and_input()
    with torch.autocast("cpu", dtype=torch.bfloat16):
        whole = run(mlp, x, None)
        out = tiled(mlp, mlp.forward, 100, x)
    assert out.dtype == torch.bfloat16
    found = torch.autograd.grad(out.float().square().mean(), [x, *mlp.parameters()])
    assert {got.dtype for got in found} == {torch.float32}
    assert_equal_gradients(found, whole, 1e-2, floor=0.0)


def test_frozen_weights_and_inputs_without_gradient() -> None:
    mlp, x = mlp_and_input()
    mlp.up_proj.weight.requires_grad_(False)
    for needs_gradient in (True, False):
        own = x.detach().requires_grad_(needs_gradient)
        whole = [None if g is None else g.clone() for g in run(mlp, own, None)]
        for got, expected in zip(run(mlp, own, 50), whole, strict=True):
            assert (got is None) == (expected is None)
            assert got is None or float((got - expected).norm()) <= 1e-5 * float(expected.norm())
    mlp.requires_grad_(False)
    assert not tiled(mlp, mlp.forward, 50, x.detach()).requires_grad


@pytest.fixture
def one_rank() -> Iterator[None]:
    # Engines of other tests in this process leave one.
    is_ours = not torch.distributed.is_initialized()
    if is_ours:
        torch.distributed.init_process_group("gloo", store=torch.distributed.HashStore(), rank=0, world_size=1)
    yield
    if is_ours:
        torch.distributed.destroy_process_group()


def test_wrong_tiles_are_refused_by_name(one_rank: None) -> None:
    mlp, x = mlp_and_input()
    with pytest.raises(ValueError, match="at least 1 token, received 0"):
        tiled(mlp, mlp.forward, 0, x)
    fully_shard(mlp, mesh=torch.distributed.init_device_mesh("cpu", (1,)))
    with pytest.raises(ValueError, match="sharded by itself"):
        tiled(mlp, mlp.forward, 5, x)


def test_the_memory_model_chooses_no_tiles_of_parts_that_are_sharded_by_themselves(one_rank: None) -> None:
    model, found = build("dense"), []
    for layer in model.model.layers[:2]:
        memory = read_memory_model(model, dtype=torch.float32, device=torch.device("cpu"))
        found.append(memory is not None and memory.tiles)
        fully_shard(layer.mlp, mesh=torch.distributed.init_device_mesh("cpu", (1,)))
    assert found == [True, False]
