"""The Triton kernels of the gated delta rule, interpreted on a CPU and compiled on CUDA, against float64."""

from typing import Any

import pytest
import torch
from delta_rows import NAMES, SMALL_TILES, chains_from_one_tile, delta_leaves, fork
from tree_shapes import SHAPES, subtree_end_of

pytest.importorskip("triton", reason="Triton is not installed")

from tree_kernels import TreeLayout, UnsupportedImplementation, tree_gated_delta_rule
from tree_kernels.tree_gated_delta_rule.triton_kernels.autograd import triton_delta_rule

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
# Relative errors in norm: sums of a tile in 24 bits, and operands rounded to 11 bits a few times on the way.
ERROR = {torch.float32: 2e-6, torch.float16: 3e-3}
SMALL: dict[str, Any] = {"key_heads": 1, "value_heads": 2, "key_size": 16, "value_size": 16}


def outputs_and_gradients(
    parent: list[int],
    dtype: torch.dtype,
    *,
    tile_tokens: int | None = 16,
    states_at: tuple[int, ...] = (),
    impl: str = "triton",
    **problem: Any,
) -> list[dict[str, torch.Tensor]]:
    """The Triton result in `dtype` and the reference's in float64 from the same rounded inputs."""
    layout = TreeLayout.from_subtree_end(subtree_end_of(parent)).to(DEVICE)
    leaves = {name: leaf.detach().to(DEVICE) for name, leaf in delta_leaves(len(parent), **problem).items()}
    rounded = {name: leaf.to(dtype if name in "qkv" else torch.float32) for name, leaf in leaves.items()}
    results = []
    for precise in (False, True):
        inputs = [(rounded[n].double() if precise else rounded[n]).requires_grad_() for n in NAMES]
        if precise or tile_tokens is None:
            out, states = tree_gated_delta_rule(
                *inputs[:5], layout, scale=0.25, initial_state=inputs[5], return_states_at=states_at,
                impl="reference" if precise else impl,
            )  # fmt: skip
        else:
            out, states = triton_delta_rule(*inputs[:5], layout, 0.25, inputs[5], states_at, tile_tokens=tile_tokens)
        assert states is not None
        draw = torch.Generator().manual_seed(1)
        weights = [torch.randn(t.shape, generator=draw, dtype=torch.float64).to(DEVICE) for t in (out, states)]
        loss = (weights[0] * out.double()).sum() + (weights[1] * states.double()).sum()
        gradients = torch.autograd.grad(loss, inputs)
        results.append({"out": out, "states": states} | dict(zip(NAMES, gradients, strict=True)))
    return results


def check(parent: list[int], dtype: torch.dtype, **options: Any) -> None:
    actual, expected = outputs_and_gradients(parent, dtype, **options)
    for name, true in expected.items():
        got = actual[name].detach()
        assert got.isfinite().all() and got.shape == true.shape
        error = float((got.double() - true.detach()).norm() / true.detach().norm().clamp(min=1e-2))
        assert error < ERROR[dtype], (name, error)


@pytest.mark.parametrize(("shape", "size", "dtype"), SMALL_TILES)
def test_forests_in_small_tiles(shape: str, size: int, dtype: torch.dtype) -> None:
    check(SHAPES[shape](size), dtype, states_at=(size - 1, size // 2), **SMALL)


def test_tiles_that_several_chains_leave_in_several_places() -> None:
    check(chains_from_one_tile(), torch.float32, states_at=(7, 15), **SMALL)


def test_two_value_heads_share_a_key_head_of_another_size() -> None:
    check(fork(3, [4, 3]), torch.float32, key_heads=1, value_heads=2, key_size=16, value_size=32)


@pytest.mark.slow
@pytest.mark.parametrize("dtype", (torch.float32, torch.float16))
def test_the_state_size_of_qwen3_5(dtype: torch.dtype) -> None:
    heads = {"key_heads": 1, "value_heads": 2, "key_size": 128, "value_size": 128}
    check(fork(17, [6, 3]), dtype, decay=(1e-3, 20.0), states_at=(19,), **heads)


def test_a_branch_changes_no_bit_of_its_siblings() -> None:
    parent = fork(4, [3, 12, 2])
    layout = TreeLayout.from_subtree_end(subtree_end_of(parent)).to(DEVICE)
    others = [*range(4, 7), *range(19, 21)]
    results = []
    for seed in (0, 1):
        inputs = [leaf.detach().float() for leaf in delta_leaves(len(parent), **SMALL).values()]
        for leaf, other in zip(inputs, delta_leaves(len(parent), seed=seed, **SMALL).values(), strict=True):
            if len(leaf) == len(parent):
                leaf[7:19] = other.detach()[7:19]
        inputs = [leaf.to(DEVICE).requires_grad_() for leaf in inputs]
        out, _ = triton_delta_rule(*inputs[:5], layout, 0.25, inputs[5], (), tile_tokens=16)
        results.append([t[others] for t in (out, *torch.autograd.grad(out.square().sum(), inputs[:5]))])
    assert all(torch.equal(one, two) for one, two in zip(*results, strict=True))


@pytest.mark.skipif(torch.cuda.is_available(), reason="says what a machine without CUDA runs")
def test_what_cannot_run_is_refused_by_name() -> None:
    leaves = [leaf.detach().float() for leaf in delta_leaves(3).values()]
    with pytest.raises(UnsupportedImplementation, match="state sizes in"):
        tree_gated_delta_rule(*leaves[:5], subtree_end_of([-1, 0, 1]), impl="triton")
    small = [leaf.detach().bfloat16() for leaf in delta_leaves(3, **SMALL).values()]
    with pytest.raises(UnsupportedImplementation, match="bfloat16"):
        tree_gated_delta_rule(*small[:5], subtree_end_of([-1, 0, 1]), impl="triton")
