"""The Triton kernels of Mamba 2's recurrence, interpreted on a CPU and compiled on CUDA, against float64."""

from typing import Any

import pytest
import torch
from delta_rows import SMALL_TILES, chains_from_one_tile, fork
from recurrence_rows import relative_error
from state_space_leaves import NAMES, leaves_of
from tree_shapes import SHAPES, subtree_end_of

pytest.importorskip("triton", reason="Triton is not installed")

from tree_kernels import TreeLayout, UnsupportedImplementation, tree_state_space
from tree_kernels.tree_state_space.api import PROVEN_SIZES, chosen_implementation
from tree_kernels.tree_state_space.triton_kernels.autograd import triton_state_space

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
ERROR = {torch.float32: 2e-6, torch.float16: 3e-3, torch.bfloat16: 2e-2}
"""Relative errors in norm: sums of a tile in 24 bits, and operands rounded to 11 or 8 bits a few times on the way."""
SMALL: dict[str, Any] = {"groups": 1, "heads": 2, "state": 16, "head_size": 16}
NEMOTRON: dict[str, Any] = {"groups": 2, "heads": 32, "state": 128, "head_size": 64}
ZAMBA: dict[str, Any] = {"groups": 1, "heads": 32, "state": 64, "head_size": 64}


def results_of(
    parent: list[int],
    dtype: torch.dtype,
    *,
    tile_tokens: int | None = 16,
    states_at: tuple[int, ...] = (),
    truth: str = "reference",
    **problem: Any,
) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
    """Outputs, states and gradients with Triton in `dtype`, and in float64 from the same rounded inputs."""
    layout = TreeLayout.from_subtree_end(subtree_end_of(parent)).to(DEVICE)
    leaves = {name: leaf.to(DEVICE) for name, leaf in leaves_of(len(parent), **problem).items()}
    rounded = [leaf.to(dtype if name in "xbc" else torch.float32) for name, leaf in leaves.items()]
    results = []
    for precise in (False, True):
        inputs = [(leaf.double() if precise else leaf.clone()).requires_grad_() for leaf in rounded]
        if precise or tile_tokens is None:
            impl = truth if precise else "triton"
            options = {"initial_state": inputs[5], "return_states_at": states_at, "impl": impl}
            out, states = tree_state_space(*inputs[:5], layout, **options)
        else:
            out, states = triton_state_space(*inputs[:5], layout, inputs[5], states_at, tile_tokens=tile_tokens)
        assert states is not None
        draw = torch.Generator().manual_seed(1)
        weights = [torch.randn(t.shape, generator=draw, dtype=torch.float64).to(DEVICE) for t in (out, states)]
        loss = (weights[0] * out.double()).sum() + (weights[1] * states.double()).sum()
        results.append([out, states, *torch.autograd.grad(loss, inputs)])
    return results[0], results[1]


def check(parent: list[int], dtype: torch.dtype, **options: Any) -> None:
    actual, expected = results_of(parent, dtype, **options)
    for name, got, true in zip(("out", "states", *NAMES), actual, expected, strict=True):
        assert got.shape == true.shape
        assert relative_error(got, true, smallest=1e-2) < ERROR[dtype], name


@pytest.mark.parametrize(("shape", "size", "dtype"), SMALL_TILES)
def test_forests_in_small_tiles(shape: str, size: int, dtype: torch.dtype) -> None:
    check(SHAPES[shape](size), dtype, states_at=(size - 1, size // 2), **SMALL)


def test_tiles_that_several_chains_leave_in_several_places() -> None:
    check(chains_from_one_tile(), torch.float32, states_at=(7, 15), **SMALL)


def test_a_large_group_of_heads_is_divided() -> None:
    check(fork(3, [2, 1]), torch.float32, groups=1, heads=16, state=16, head_size=32)


def test_other_sizes_are_refused_by_name() -> None:
    leaves = [leaf.float() for leaf in list(leaves_of(3, state=24, head_size=16).values())[:5]]
    with pytest.raises(UnsupportedImplementation, match=r"state sizes in .* received 24 x 16"):
        tree_state_space(*leaves, subtree_end_of([-1, 0, 1]), impl="triton")


def test_auto_takes_triton_at_proven_sizes_on_a_gpu_only() -> None:
    sizes = {"dtype": torch.bfloat16, "state_size": 128, "head_size": 64}
    assert chosen_implementation(device=torch.device("cpu"), **sizes) == "chunked"
    on_gpu = "triton" if DEVICE.type == "cuda" and (128, 64) in PROVEN_SIZES else "chunked"
    assert chosen_implementation(device=DEVICE, **sizes) == on_gpu
    assert chosen_implementation(device=DEVICE, **sizes | {"dtype": torch.float32}) == "chunked"


FORESTS = {
    "forest": SHAPES["forest"](900),
    "comb": SHAPES["comb"](600),
    "star": fork(30, [20] * 30),
    "prefix_65": fork(65, [129, 64, 1, 200]),
}


@pytest.mark.gpu
@pytest.mark.skipif(DEVICE.type != "cuda", reason="needs a CUDA device")
@pytest.mark.parametrize("heads", (NEMOTRON, ZAMBA, NEMOTRON | {"head_size": 128}), ids=("nemotron", "zamba", "wide"))
@pytest.mark.parametrize("dtype", (torch.bfloat16, torch.float16))
@pytest.mark.parametrize("forest", FORESTS)
def test_compiled_kernels_equal_float64_and_repeat_bitwise(forest: str, dtype: torch.dtype, heads: Any) -> None:
    parent = FORESTS[forest]
    options = {"tile_tokens": None, "states_at": (len(parent) - 1, 5), "truth": "chunked", **heads}
    check(parent, dtype, **options)
    first, second = (results_of(parent, dtype, **options)[0] for _ in range(2))
    assert all(torch.equal(one, two) for one, two in zip(first, second, strict=True))
