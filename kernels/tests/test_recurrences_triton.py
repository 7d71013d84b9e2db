"""The Triton kernels of the recurrences, interpreted on a CPU and compiled on CUDA, against float64."""

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any

import pytest
import recurrences
import torch
from recurrences import DELTA_RULE, SCALE, STATE_SPACE, Recurrence, chains_from_one_tile, rounded_leaves
from tree_shapes import SHAPES, fork, layout_of, subtree_end_of

pytest.importorskip("triton", reason="Triton is not installed")

from tree_kernels import UnsupportedImplementation, tree_gated_delta_rule, tree_state_space
from tree_kernels.tree_gated_delta_rule import api
from tree_kernels.tree_gated_delta_rule.triton_kernels import problem, sizes
from tree_kernels.tree_gated_delta_rule.triton_kernels.autograd import triton_delta_rule
from tree_kernels.tree_state_space import api as state_space_api
from tree_kernels.tree_state_space.triton_kernels.autograd import triton_state_space

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
# Relative errors in norm: sums of a tile in 24 bits, and operands rounded to 11 bits a few times on the way.
ERROR = {torch.float32: 2e-6, torch.float16: 3e-3}
SMALL: dict[str, Any] = {"groups": 1, "heads": 2, "key_size": 16, "value_size": 16}


def delta_rule_in_tiles(*inputs: Any, initial_state: torch.Tensor, return_states_at: tuple[int, ...]) -> Any:
    return triton_delta_rule(*inputs, SCALE, initial_state, return_states_at, tile_tokens=16)


def state_space_in_tiles(*inputs: Any, initial_state: torch.Tensor, return_states_at: tuple[int, ...]) -> Any:
    return triton_state_space(*inputs, initial_state, return_states_at, tile_tokens=16)


KERNELS: dict[str, tuple[Recurrence, Callable[..., Any]]] = {
    "gated_delta_rule": (DELTA_RULE, delta_rule_in_tiles),
    "state_space": (STATE_SPACE, state_space_in_tiles),
}


def check(
    name: str,
    parent: list[int],
    dtype: torch.dtype,
    *,
    in_small_tiles: bool = True,
    states_at: tuple[int, ...] = (),
    **problem: Any,
) -> None:
    """Tiles of 16 tokens unless the operation decides."""
    recurrence, in_tiles = KERNELS[name]
    rounded, exact = rounded_leaves(recurrence, len(parent), dtype, DEVICE, **problem)
    run = in_tiles if in_small_tiles else partial(recurrence.run, impl="triton")
    given = {"layout": layout_of(parent).to(DEVICE), "return_states_at": states_at}
    got = recurrences.outputs_and_gradients(run, rounded, **given)
    true = recurrences.outputs_and_gradients(recurrence.run, exact, **given, impl="reference")
    for part, expected in true.items():
        assert got[part].shape == expected.shape
        assert recurrences.relative_error(got[part], expected, smallest=1e-2) < ERROR[dtype], part


@pytest.mark.parametrize("name", KERNELS)
@pytest.mark.parametrize(("shape", "size", "dtype"), recurrences.SMALL_TILES)
def test_forests_in_small_tiles(name: str, shape: str, size: int, dtype: torch.dtype) -> None:
    check(name, SHAPES[shape](size), dtype, states_at=(size - 1, size // 2), **SMALL)


@pytest.mark.parametrize("name", KERNELS)
def test_tiles_that_several_chains_leave_in_several_places(name: str) -> None:
    check(name, chains_from_one_tile(), torch.float32, states_at=(7, 15), **SMALL)


@pytest.mark.parametrize(("dtype", "block_rows", "repeats"), [(torch.float32, 8, False), (torch.float16, 16, True)])
def test_tiles_are_inverted_by_blocks_of_rows(
    dtype: torch.dtype, block_rows: int, repeats: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As half precision at the sizes of models has it; equal keys ask most of an inverse."""
    usual = problem.launches_for
    monkeypatch.setattr(problem, "launches_for", lambda *how: replace(usual(*how), inverse_block_rows=block_rows))
    sizes = SMALL | {"repeats_keys": repeats, "decay": (1e-3, 1e-2) if repeats else (1e-3, 2.0)}
    check("gated_delta_rule", chains_from_one_tile(), dtype, states_at=(7, 15), **sizes)


def test_two_value_heads_share_a_key_head_of_another_size() -> None:
    check("gated_delta_rule", fork(3, [4, 3]), torch.float32, **SMALL | {"value_size": 32})


def test_a_large_group_of_heads_is_divided() -> None:
    check("state_space", fork(3, [2, 1]), torch.float32, **SMALL | {"heads": 16, "value_size": 32})


@pytest.mark.slow
@pytest.mark.parametrize("dtype", (torch.float32, torch.float16))
def test_the_state_size_of_qwen3_5(dtype: torch.dtype) -> None:
    heads = SMALL | {"key_size": 128, "value_size": 128}
    problem = {"states_at": (19,), "decay": (1e-3, 20.0), **heads}
    check("gated_delta_rule", fork(17, [6, 3]), dtype, in_small_tiles=False, **problem)


@pytest.mark.parametrize(
    ("dtype", "prefix", "tails", "sizes"),
    [
        (torch.float32, 4, (3, 12, 2), SMALL),
        *(
            pytest.param(dtype, 65, (130, 64, 40), {"key_size": 128, "value_size": 128}, marks=pytest.mark.gpu)
            for dtype in (torch.bfloat16, torch.float32)
        ),
    ],
)
def test_a_branch_changes_no_bit_of_its_siblings(
    dtype: torch.dtype, prefix: int, tails: tuple[int, ...], sizes: dict[str, Any]
) -> None:
    parent, start = fork(prefix, tails), prefix + tails[0]
    branch, layout = slice(start, start + tails[1]), layout_of(parent).to(DEVICE)
    both = (rounded_leaves(DELTA_RULE, len(parent), dtype, DEVICE, seed=seed, **sizes)[0] for seed in (0, 1))
    (*given, state), (*other, _) = (leaves.values() for leaves in both)
    how = {"initial_state": state, "return_states_at": ()}
    run = delta_rule_in_tiles if sizes is SMALL else partial(tree_gated_delta_rule, scale=SCALE, impl="triton")
    others = [*range(prefix, start), *range(branch.stop, len(parent))]
    recurrences.assert_siblings_keep_their_bits(
        lambda *inputs: run(*inputs, layout, **how)[0], given, other, branch, others
    )


def test_other_sizes_and_dtypes_are_refused_by_name() -> None:
    end = subtree_end_of([-1, 0, 1])
    for operation, leaves, received in (
        (tree_gated_delta_rule, DELTA_RULE.leaves_of(3), "state sizes in"),
        (tree_state_space, STATE_SPACE.leaves_of(3, key_size=24, value_size=16), "state sizes in .* received 24 x 16"),
    ):
        with pytest.raises(UnsupportedImplementation, match=received):
            operation(*(leaf.float() for leaf in list(leaves.values())[:5]), end, impl="triton")
    if DEVICE.type == "cpu":
        small = [leaf.bfloat16() for leaf in DELTA_RULE.leaves_of(3, **SMALL).values()]
        with pytest.raises(UnsupportedImplementation, match="bfloat16"):
            tree_gated_delta_rule(*small[:5], end, impl="triton")


@pytest.mark.parametrize(
    ("device", "dtype", "chosen"),
    [
        ("cuda", torch.bfloat16, {(128, 128): "triton", (128, 64): "triton", (32, 32): "chunked"}),
        ("cuda", torch.float16, {(64, 64): "triton"}),
        ("cuda", torch.float32, {(128, 128): "chunked", (128, 64): "chunked"}),
        ("cpu", torch.bfloat16, {(128, 128): "chunked", (128, 64): "chunked"}),
    ],
)
def test_auto_takes_triton_where_it_is_proven_and_compiles_soon(
    device: str, dtype: torch.dtype, chosen: dict[tuple[int, int], str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sizes, "triton_unavailable_reason", lambda *_: None)
    problem = {"device": torch.device(device), "dtype": dtype}
    for (first, second), impl in chosen.items():
        assert state_space_api.chosen_implementation(**problem, state_size=first, head_size=second) == impl
        if first == second:
            assert api.chosen_implementation(**problem, key_size=first, value_size=second) == impl
