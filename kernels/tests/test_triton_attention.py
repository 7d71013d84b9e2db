"""The Triton kernels, in the interpreter, equal the float64 reference in tiles of any size, and in float16.

test_tree_attention_is_row_attention.py holds them against rows alone in every shape, with every option.
"""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from attention_problems import ANY_OPTIONS, EVERYTHING, by, in_float64, outputs_and_gradients, problem, relative_error
from hypothesis import given, settings
from hypothesis import strategies as st
from tree_shapes import SHAPES, subtree_end_of, tries

pytest.importorskip("triton", reason="Triton is not installed")

from tree_kernels import TreeLayout, tree_attention
from tree_kernels.tree_attention.block_lists import block_lists
from tree_kernels.tree_attention.score_rule import ScoreRule
from tree_kernels.tree_attention.triton_kernels.autograd import triton_attention
from tree_kernels.tree_attention.triton_kernels.key_pieces import key_pieces
from tree_kernels.tree_attention.triton_kernels.sizes import Tile, Tiles

pytestmark = pytest.mark.skipif(torch.cuda.is_available(), reason="test_triton_on_cuda.py holds the compiled kernels")

# Relative error: a few roundings of 24 and of 11 bits.
ERROR = {torch.float32: 1e-6, torch.float16: 1e-3}


def same_tiles(rows: int, keys: int, *, packed: bool = False) -> Tiles:
    tile = Tile(rows=rows, keys=keys, warps=4, stages=1, packed=packed)
    return Tiles(forward=tile, query_gradient=tile, key_gradients=(tile,))


def in_tiles(tiles: Tiles, layout: TreeLayout) -> Callable[..., Any]:
    """The kernels with tiles of their own."""

    def attend(
        q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, *, sinks: torch.Tensor | None = None, **options: Any
    ) -> Any:
        if "past_k" in options:
            k, v = torch.cat([options.pop("past_k"), k]), torch.cat([options.pop("past_v"), v])
        rule = ScoreRule(**options | {"scale": options.get("scale") or q.shape[-1] ** -0.5})
        return triton_attention(q, k, v, sinks, layout, rule, tiles=tiles)

    return attend


def check(
    parent: list[int],
    *,
    heads: tuple[int, int] = (2, 1),
    head_size: int = 16,
    value_size: int | None = None,
    past: int = 0,
    dtype: torch.dtype = torch.float32,
    tiles: Tiles | None = None,
    **options: Any,
) -> None:
    leaves, grads = problem(len(parent), heads, head_size, past, dtype, value_size=value_size)
    layout = TreeLayout.from_subtree_end(subtree_end_of(parent), past_length=past)
    attend = by("triton", layout) if tiles is None else in_tiles(tiles, layout)
    actual = outputs_and_gradients(attend, leaves, grads, **options)
    wanted = outputs_and_gradients(by("reference", layout), in_float64(leaves), grads, **options)
    assert actual.keys() == wanted.keys()
    for name, got in actual.items():
        assert got.dtype == (torch.float32 if name == "lse" else dtype)
        assert relative_error(got, wanted[name]) < ERROR[dtype], name


@pytest.mark.parametrize(("shape", "size"), [("trunk_and_stubs", 65), ("forest", 33)])
def test_everything_at_once(shape: str, size: int) -> None:
    check(SHAPES[shape](size), tiles=same_tiles(64, 16, packed=True), heads=(4, 2), **EVERYTHING)


@pytest.mark.parametrize(("heads", "packed"), [*(((3, 3), False), ((4, 2), True), ((6, 2), False), ((7, 1), True))])
def test_every_grouping_of_heads(heads: tuple[int, int], packed: bool) -> None:
    check(SHAPES["random_trie"](40), heads=heads, past=5, tiles=same_tiles(32, 32, packed=packed))


@pytest.mark.parametrize(("head_size", "value_size"), [(48, 16), (16, 40)])
def test_gradients_of_keys_and_values_by_a_kernel_each(head_size: int, value_size: int) -> None:
    two_kernels = replace(same_tiles(16, 16), key_gradients=same_tiles(16, 16).key_gradients * 2)
    sizes: dict[str, Any] = {"head_size": head_size, "value_size": value_size, "heads": (4, 2)}
    check(SHAPES["forest"](33), tiles=two_kernels, **sizes, **EVERYTHING)


@pytest.mark.parametrize(("tile", "packed"), [*(((16, 64), True), ((64, 16), False), ((128, 64), True))])
def test_the_tile_changes_nothing(tile: tuple[int, int], packed: bool) -> None:
    check(SHAPES["bushy_trie"](70), heads=(4, 2), past=30, tiles=same_tiles(*tile, packed=packed))


def test_a_root_seen_by_all_is_summed_from_pieces() -> None:
    parent = SHAPES["star"](130)
    layout = TreeLayout.from_subtree_end(subtree_end_of(parent))
    lists = block_lists(layout, query_block=16, key_block=16, by="key")
    assert key_pieces(layout, lists, key_heads=1, programs=2).slot_count.tolist() == [2] + [0] * 8
    tiles = same_tiles(16, 16)
    check(parent, tiles=replace(tiles, key_gradients=tiles.key_gradients * 2))


@pytest.mark.parametrize("option", [{}, EVERYTHING])
def test_float16(option: dict[str, Any]) -> None:
    check(SHAPES["forest"](129), dtype=torch.float16, head_size=32, **option)


@settings(max_examples=5, deadline=None, database=None, derandomize=True)
@given(parent=tries(50), options=ANY_OPTIONS, tile=st.sampled_from([(16, 16), (32, 16), (16, 32)]))
def test_random_tries(parent: list[int], options: dict[str, Any], tile: tuple[int, int]) -> None:
    check(parent, lse=True, tiles=same_tiles(*tile, packed=True), **options)


def test_strides_of_tokens_and_heads_are_free() -> None:
    """Head-major tensors, as Hugging Face models hand them on, and gradients that repeat one number."""
    size, heads, head_size = 37, 2, 16
    generator = torch.Generator().manual_seed(0)
    layout = TreeLayout.from_subtree_end(subtree_end_of(SHAPES["forest"](size)))
    results = []
    for impl, dtype in (("triton", torch.float32), ("reference", torch.float64)):
        generator.manual_seed(0)
        head_major = [
            torch.randn(heads, size, 2 * head_size, generator=generator).to(dtype).requires_grad_() for _ in range(3)
        ]
        q, k, v = (t.transpose(0, 1)[..., :head_size] for t in head_major)
        out = tree_attention(q, k[:, :1], v[:, :1].expand(size, 1, head_size), layout, impl=impl)
        assert isinstance(out, torch.Tensor)
        one_value = tree_attention(q, k[:, :1], v[:1, :1].expand(size, 1, head_size), layout, impl=impl)
        assert isinstance(one_value, torch.Tensor)
        results.append(torch.autograd.grad(out.sum() + one_value.square().sum(), head_major))
    for actual, expected in zip(*results, strict=True):
        assert relative_error(actual, expected) < ERROR[torch.float32]


def test_only_the_log_sum_exp_may_be_used() -> None:
    leaves, grads = problem(20, (2, 1), 16, 0, torch.float32)
    layout = TreeLayout.from_subtree_end(subtree_end_of(SHAPES["comb"](20)))
    results = []
    for impl, dtype in (("triton", torch.float32), ("reference", torch.float64)):
        q, k, v = (leaves[name].detach().to(dtype).requires_grad_() for name in ("q", "k", "v"))
        _, lse = tree_attention(q, k, v, layout, impl=impl, return_lse=True)
        found = torch.autograd.grad((lse * grads["lse"].to(dtype)).sum(), (q, k, v), allow_unused=True)
        results.append([torch.zeros_like(q) if g is None else g for g in found[:2]])
    for actual, expected in zip(*results, strict=True):
        assert relative_error(actual, expected) < ERROR[torch.float32]
