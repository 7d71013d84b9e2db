"""The Triton kernels, in the interpreter, equal the float64 reference in tiles of any size, and in float16.

test_tree_attention_is_row_attention.py holds them against rows alone in every shape, with every option.
"""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from attention_problems import ANY_OPTIONS, EVERYTHING, by, in_float64, outputs_and_gradients, problem, relative_error
from hypothesis import given, settings
from hypothesis import strategies as st
from tree_shapes import SHAPES, layout_of, tries

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


def same_tiles(rows: int, keys: int, *, packed: bool = False, kernels: int = 1) -> Tiles:
    """Gradients of keys and values by one kernel, or by a kernel each."""
    tile = Tile(rows=rows, keys=keys, warps=4, stages=1, packed=packed)
    return Tiles(forward=tile, query_gradient=tile, key_gradients=(tile,) * kernels)


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
    layout = layout_of(parent, past)
    attend = by("triton", layout) if tiles is None else in_tiles(tiles, layout)
    actual = outputs_and_gradients(attend, leaves, grads, **options)
    wanted = outputs_and_gradients(by("reference", layout), in_float64(leaves), grads, **options)
    assert actual.keys() == wanted.keys()
    for name, got in actual.items():
        assert got.dtype == (torch.float32 if name == "lse" else dtype)
        assert relative_error(got, wanted[name]) < ERROR[dtype], name


GROUPED: dict[str, Any] = {"heads": (4, 2), **EVERYTHING}
CASES: list[tuple[str, int, Tiles | None, dict[str, Any]]] = [
    ("trunk_and_stubs", 65, same_tiles(64, 16, packed=True), GROUPED),
    ("forest", 33, same_tiles(64, 16, packed=True), GROUPED),
    ("random_trie", 40, same_tiles(32, 32), {"heads": (3, 3), "past": 5}),
    ("random_trie", 40, same_tiles(32, 32, packed=True), {"heads": (4, 2), "past": 5}),
    ("random_trie", 40, same_tiles(32, 32), {"heads": (6, 2), "past": 5}),
    ("random_trie", 40, same_tiles(32, 32, packed=True), {"heads": (7, 1), "past": 5}),
    ("bushy_trie", 70, same_tiles(16, 64, packed=True), {"heads": (4, 2), "past": 30}),
    ("bushy_trie", 70, same_tiles(64, 16), {"heads": (4, 2), "past": 30}),
    ("bushy_trie", 70, same_tiles(128, 64, packed=True), {"heads": (4, 2), "past": 30}),
    ("forest", 33, same_tiles(16, 16, kernels=2), {"head_size": 48, "value_size": 16, **GROUPED}),
    ("forest", 33, same_tiles(16, 16, kernels=2), {"head_size": 16, "value_size": 40, **GROUPED}),
    *(("forest", 129, None, {"dtype": torch.float16, "head_size": 32, **option}) for option in ({}, EVERYTHING)),
]


@pytest.mark.parametrize(("shape", "size", "tiles", "options"), CASES)
def test_tiles_of_any_size_give_what_the_reference_gives(
    shape: str, size: int, tiles: Tiles | None, options: dict[str, Any]
) -> None:
    check(SHAPES[shape](size), tiles=tiles, **options)


def test_a_root_seen_by_all_is_summed_from_pieces() -> None:
    parent = SHAPES["star"](130)
    layout = layout_of(parent)
    lists = block_lists(layout, query_block=16, key_block=16, by="key")
    assert key_pieces(layout, lists, key_heads=1, programs=2).slot_count.tolist() == [2] + [0] * 8
    check(parent, tiles=same_tiles(16, 16, kernels=2))


@settings(max_examples=5, deadline=None, database=None, derandomize=True)
@given(parent=tries(50), options=ANY_OPTIONS, tile=st.sampled_from([(16, 16), (32, 16), (16, 32)]))
def test_random_tries(parent: list[int], options: dict[str, Any], tile: tuple[int, int]) -> None:
    check(parent, lse=True, tiles=same_tiles(*tile, packed=True), **options)


def test_strides_of_tokens_and_heads_are_free() -> None:
    """Head-major tensors, as Hugging Face models hand them on, and gradients that repeat one number."""
    size, heads, head_size = 37, 2, 16
    layout = layout_of(SHAPES["forest"](size))
    drawn = torch.randn(3, heads, size, 2 * head_size, generator=torch.Generator().manual_seed(0))
    results = []
    for impl, dtype in (("triton", torch.float32), ("reference", torch.float64)):
        head_major = [t.to(dtype).requires_grad_() for t in drawn]
        q, k, v = (t.transpose(0, 1)[..., :head_size] for t in head_major)
        of_values = (t.expand(size, 1, head_size) for t in (v[:, :1], v[:1, :1]))
        out, one_value = (tree_attention(q, k[:, :1], value, layout, impl=impl) for value in of_values)
        results.append(torch.autograd.grad(out.sum() + one_value.square().sum(), head_major))
    for actual, expected in zip(*results, strict=True):
        assert relative_error(actual, expected) < ERROR[torch.float32]


def test_only_the_log_sum_exp_may_be_used() -> None:
    leaves, grads = problem(20, (2, 1), 16, 0, torch.float32)
    layout = layout_of(SHAPES["comb"](20))
    results = []
    for impl, dtype in (("triton", torch.float32), ("reference", torch.float64)):
        q, k, v = (leaves[name].detach().to(dtype).requires_grad_() for name in ("q", "k", "v"))
        _, lse = tree_attention(q, k, v, layout, impl=impl, return_lse=True)
        found = torch.autograd.grad((lse * grads["lse"].to(dtype)).sum(), (q, k, v), allow_unused=True)
        results.append([torch.zeros_like(q) if g is None else g for g in found[:2]])
    for actual, expected in zip(*results, strict=True):
        assert relative_error(actual, expected) < ERROR[torch.float32]
