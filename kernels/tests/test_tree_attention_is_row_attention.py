"""Outputs and gradients of every implementation equal those of every row run alone, in float64."""

from importlib.util import find_spec
from typing import Any

import pytest
import torch
from attention_problems import ANY_OPTIONS, EVERYTHING, by, in_float64, outputs_and_gradients, problem, relative_error
from hypothesis import given, settings
from row_by_row import row_by_row_attention
from tree_shapes import SHAPES, layout_of, tries

from tree_kernels import tree_attention
from tree_kernels.tree_attention.portable.blocked import blocked_attention
from tree_kernels.tree_attention.score_rule import ScoreRule

EXACT = ("reference", "sdpa")
INTERPRETED = ("triton",) if find_spec("triton") is not None and not torch.cuda.is_available() else ()
TOLERANCE = 1e-10
TRITON_ERROR = 1e-6
"""Relative: a few roundings of 24 bits."""


def largest_error(actual: torch.Tensor, expected: torch.Tensor) -> float:
    assert actual.shape == expected.shape
    return 0.0 if actual.numel() == 0 else float((actual - expected).detach().abs().max())


def check(
    parent: list[int],
    *,
    impls: tuple[str, ...] = (*EXACT, *INTERPRETED),
    heads: tuple[int, int] = (2, 1),
    head_size: int = 8,
    value_size: int | None = None,
    past: int = 0,
    **options: Any,
) -> None:
    """Triton has float32 alone; `options` as in `outputs_and_gradients`."""
    leaves, grads = problem(len(parent), heads, head_size, past, torch.float32, value_size=value_size)
    exact = in_float64(leaves)
    expected = outputs_and_gradients(
        lambda *qkv, **given: row_by_row_attention(*qkv, parent, **given), exact, grads, **options
    )
    layout = layout_of(parent, past)
    has_lse = options.get("lse", False)
    for impl in impls:
        attend = by(impl, layout, return_lse=has_lse)
        actual = outputs_and_gradients(attend, leaves if impl == "triton" else exact, grads, **options)
        assert expected.keys() - actual.keys() == (set() if has_lse else {"lse"})
        for name, got in actual.items():
            if impl == "triton":
                assert got.dtype == torch.float32 and relative_error(got, expected[name]) < TRITON_ERROR, name
            else:
                assert largest_error(got, expected[name]) < TOLERANCE, (impl, name)


@pytest.mark.parametrize(
    ("shape", "size"), [*((shape, 65) for shape in SHAPES), *(("forest", size) for size in (1, 3, 63, 64, 129))]
)
def test_every_shape_and_size(shape: str, size: int) -> None:
    check(SHAPES[shape](size))


@pytest.mark.slow
def test_a_thousand_tokens_with_everything() -> None:
    check(SHAPES["trunk_and_stubs"](1000), impls=EXACT, **EVERYTHING)


@pytest.mark.parametrize(("shape", "size"), [("forest", 1), *((shape, 129) for shape in SHAPES)])
def test_everything_at_once_on_every_shape(shape: str, size: int) -> None:
    check(SHAPES[shape](size), **EVERYTHING)


@pytest.mark.parametrize(
    ("heads", "softcap"), [((1, 1), None), ((4, 4), 2.0), ((4, 2), None), ((6, 2), 2.0), ((8, 1), None)]
)
def test_every_grouping_of_heads(heads: tuple[int, int], softcap: float | None) -> None:
    check(SHAPES["random_trie"](70), heads=heads, softcap=softcap, past=5)


@pytest.mark.parametrize("head_size", [8, 24, 96, 256])
def test_every_head_size(head_size: int) -> None:
    check(SHAPES["bushy_trie"](65), head_size=head_size, past=3)
    check(SHAPES["bushy_trie"](65), head_size=head_size, sinks=True)


@pytest.mark.parametrize(("head_size", "value_size"), [(24, 16), (8, 24)])
def test_values_of_another_size_than_keys(head_size: int, value_size: int) -> None:
    check(SHAPES["bushy_trie"](65), head_size=head_size, value_size=value_size, past=3)
    check(SHAPES["forest"](129), head_size=head_size, value_size=value_size, heads=(4, 2), **EVERYTHING)


@pytest.mark.parametrize(("window", "past"), [(1, 0), (2, 40), (17, 1), (64, 40), (1000, 0)])
def test_a_window_counts_depth_not_index(window: int, past: int) -> None:
    check(SHAPES["trunk_and_stubs"](140), window=window, past=past)
    check(SHAPES["comb"](65), window=window, past=past, softcap=3.0)


@pytest.mark.parametrize(
    "option", [{"softcap": 0.7}, {"sinks": True}, {"scale": 0.25}, {"scale": -0.25}, {"lse": True}, {"past": 130}]
)
def test_every_option_alone(option: dict[str, Any]) -> None:
    check(SHAPES["forest"](130), **option)


def test_no_tokens_is_no_output_with_a_graph() -> None:
    for impl in (*EXACT, *INTERPRETED):
        leaves, _ = problem(0, (4, 2), 16, 3, torch.float32)
        layout = layout_of([], 3)
        sinks = leaves.pop("sinks")
        for used in (leaves, leaves | {"sinks": sinks}):
            qkv, rest = [used[name] for name in "qkv"], {name: t for name, t in used.items() if name not in "qkv"}
            out = tree_attention(*qkv, layout, **rest, impl=impl)
            assert isinstance(out, torch.Tensor) and out.shape == (0, 4, 16)
            (gradient,) = torch.autograd.grad(out.sum(), leaves["past_k"])
            assert torch.equal(gradient, torch.zeros_like(gradient))


@settings(max_examples=40, deadline=None, database=None)
@given(parent=tries(40), options=ANY_OPTIONS)
def test_random_tries(parent: list[int], options: dict[str, Any]) -> None:
    check(parent, impls=EXACT, head_size=4, **options)


@pytest.mark.parametrize(("block_tokens", "window"), [(1, None), (2, 6), (7, None), (64, 6), (500, None)])
def test_the_block_size_changes_nothing(block_tokens: int, window: int | None) -> None:
    parent = SHAPES["bushy_trie"](150)
    leaves, grads = problem(150, (4, 2), 8, 0, torch.float64)
    layout = layout_of(parent)
    rule = ScoreRule(scale=8**-0.5, window=window)
    actual = outputs_and_gradients(
        lambda *qkv: blocked_attention(*qkv, None, layout, rule, block_tokens=block_tokens)[0], leaves, grads
    )
    expected = outputs_and_gradients(lambda *qkv: row_by_row_attention(*qkv, parent, window=window), leaves, grads)
    for name, got in actual.items():
        assert largest_error(got, expected[name]) < TOLERANCE, name


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(
    ("impl", "device", "size", "heads", "head_size"),
    [("sdpa", "cpu", 300, (4, 2), 32), pytest.param("triton", "cuda", 3000, (8, 2), 128, marks=pytest.mark.gpu)],
)
def test_lower_precision_is_no_further_from_float64_than_plain_causal_attention(
    impl: str, device: str, size: int, heads: tuple[int, int], head_size: int, dtype: torch.dtype
) -> None:
    """On a chain both solve one problem, so torch's own error in the dtype is the yardstick (twice it, for order)."""
    leaves, grads = problem(size, heads, head_size, 0, dtype, device=device)
    layout = layout_of(SHAPES["chain"](size)).to(device)
    qkv = [leaves[name] for name in "qkv"]
    causal = torch.nn.functional.scaled_dot_product_attention(
        *(t.transpose(0, 1)[None] for t in qkv), is_causal=True, enable_gqa=True
    )[0].transpose(0, 1)
    yardstick = [causal.detach(), *torch.autograd.grad(causal, qkv, grads["out"])]
    truth = outputs_and_gradients(by("reference", layout), in_float64(leaves), grads)
    for return_lse in (False, True):
        found = outputs_and_gradients(by(impl, layout, return_lse=return_lse), leaves, grads)
        assert found["out"].dtype == dtype
        for name, plain in zip(("out", *"qkv"), yardstick, strict=True):
            assert (found[name].double() - truth[name]).norm() <= 2 * (plain.double() - truth[name]).norm(), name
