"""Outputs and gradients of every implementation equal those of every row run alone, in float64."""

from importlib.util import find_spec
from typing import Any

import pytest
import torch
from attention_problems import by, outputs_and_gradients, problem
from hypothesis import given, settings
from hypothesis import strategies as st
from row_by_row import row_by_row_attention
from tree_shapes import SHAPES, random_trie, subtree_end_of

from tree_kernels import TreeLayout, tree_attention
from tree_kernels.tree_attention.portable.blocked import blocked_attention
from tree_kernels.tree_attention.score_rule import ScoreRule

IMPLEMENTATIONS = ("reference", "sdpa")
EVERYTHING: dict[str, Any] = {"window": 9, "softcap": 1.3, "sinks": True, "past": 20, "scale": 0.4}
TOLERANCE = 1e-10


def largest_error(actual: torch.Tensor, expected: torch.Tensor) -> float:
    assert actual.shape == expected.shape
    return 0.0 if actual.numel() == 0 else float((actual - expected).detach().abs().max())


def check(
    parent: list[int],
    *,
    heads: tuple[int, int] = (2, 1),
    head_size: int = 8,
    value_size: int | None = None,
    past: int = 0,
    window: int | None = None,
    softcap: float | None = None,
    sinks: bool = False,
    scale: float | None = None,
    lse: bool = False,
) -> None:
    leaves, grads = problem(len(parent), heads, head_size, past, torch.float64, value_size=value_size)
    asked: dict[str, Any] = {"window": window, "softcap": softcap, "scale": scale, "sinks": sinks, "lse": lse}
    expected = outputs_and_gradients(
        lambda *qkv, **given: row_by_row_attention(*qkv, parent, **given), leaves, grads, **asked
    )
    layout = TreeLayout.from_subtree_end(subtree_end_of(parent), past_length=past)
    for impl in IMPLEMENTATIONS:
        actual = outputs_and_gradients(by(impl, layout, return_lse=lse), leaves, grads, **asked)
        assert expected.keys() - actual.keys() == (set() if lse else {"lse"})
        for name, got in actual.items():
            assert largest_error(got, expected[name]) < TOLERANCE, (impl, name)


@pytest.mark.parametrize(
    ("shape", "size"), [*((shape, 65) for shape in SHAPES), *(("forest", size) for size in (1, 3, 63, 64, 129))]
)
def test_every_shape_and_size(shape: str, size: int) -> None:
    check(SHAPES[shape](size))


@pytest.mark.slow
def test_a_thousand_tokens_with_everything() -> None:
    check(SHAPES["trunk_and_stubs"](1000), heads=(2, 1), head_size=8, lse=True, **EVERYTHING)


@pytest.mark.parametrize(("shape", "size"), [("forest", 1), *((shape, 129) for shape in SHAPES)])
def test_everything_at_once_on_every_shape(shape: str, size: int) -> None:
    check(SHAPES[shape](size), lse=True, **EVERYTHING)


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
    check(SHAPES["forest"](129), head_size=head_size, value_size=value_size, heads=(4, 2), lse=True, **EVERYTHING)


@pytest.mark.parametrize(("window", "past"), [(1, 0), (2, 40), (17, 1), (64, 40), (1000, 0)])
def test_a_window_counts_depth_not_index(window: int, past: int) -> None:
    check(SHAPES["trunk_and_stubs"](140), window=window, past=past)
    check(SHAPES["comb"](65), window=window, past=past, softcap=3.0)


@pytest.mark.parametrize("option", [{"softcap": 0.7}, {"sinks": True}, {"scale": 0.25}, {"lse": True}, {"past": 130}])
def test_every_option_alone(option: dict[str, Any]) -> None:
    check(SHAPES["forest"](130), **option)


def test_no_tokens_is_no_output_with_a_graph() -> None:
    interprets = find_spec("triton") is not None and not torch.cuda.is_available()
    for impl in (*IMPLEMENTATIONS, *(["triton"] if interprets else [])):
        leaves, _ = problem(0, (4, 2), 16, 3, torch.float32)
        layout = TreeLayout.from_subtree_end(torch.zeros(0, dtype=torch.int32), past_length=3)
        sinks = leaves.pop("sinks")
        for used in (leaves, leaves | {"sinks": sinks}):
            qkv, rest = [used[name] for name in "qkv"], {name: t for name, t in used.items() if name not in "qkv"}
            out = tree_attention(*qkv, layout, **rest, impl=impl)
            assert isinstance(out, torch.Tensor) and out.shape == (0, 4, 16)
            (gradient,) = torch.autograd.grad(out.sum(), leaves["past_k"])
            assert torch.equal(gradient, torch.zeros_like(gradient))


@settings(max_examples=40, deadline=None, database=None)
@given(
    size=st.integers(1, 40),
    seed=st.integers(0, 10**6),
    branching=st.sampled_from([0.05, 0.3, 0.7]),
    roots=st.integers(1, 4),
    past=st.integers(0, 12),
    window=st.one_of(st.none(), st.integers(1, 20)),
    softcap=st.one_of(st.none(), st.just(1.0)),
    sinks=st.booleans(),
)
def test_random_tries(
    size: int,
    seed: int,
    branching: float,
    roots: int,
    past: int,
    window: int | None,
    softcap: float | None,
    sinks: bool,
) -> None:
    parent = random_trie(size, seed, branching=branching, roots=roots)
    check(parent, past=past, window=window, softcap=softcap, sinks=sinks, head_size=4)


@pytest.mark.parametrize(("block_tokens", "window"), [(1, None), (2, 6), (7, None), (64, 6), (500, None)])
def test_the_block_size_changes_nothing(block_tokens: int, window: int | None) -> None:
    parent = SHAPES["bushy_trie"](150)
    leaves, grads = problem(150, (4, 2), 8, 0, torch.float64)
    layout = TreeLayout.from_subtree_end(subtree_end_of(parent))
    rule = ScoreRule(scale=8**-0.5, window=window)
    actual = outputs_and_gradients(
        lambda *qkv: blocked_attention(*qkv, None, layout, rule, block_tokens=block_tokens), leaves, grads
    )
    expected = outputs_and_gradients(lambda *qkv: row_by_row_attention(*qkv, parent, window=window), leaves, grads)
    for name, got in actual.items():
        assert largest_error(got, expected[name]) < TOLERANCE, name


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_lower_precision_is_no_further_from_float64_than_plain_causal_attention(dtype: torch.dtype) -> None:
    """On a chain both solve one problem, so torch's own error in the dtype is the yardstick (twice it, for order)."""
    size = 300
    leaves, _ = problem(size, (4, 2), 32, 0, torch.float64)
    qkv = [leaves[name].detach().to(dtype).requires_grad_() for name in ("q", "k", "v")]
    exact = [t.detach().double().requires_grad_() for t in qkv]
    grad = torch.randn(size, 4, 32, dtype=torch.float64)
    layout = TreeLayout.from_subtree_end(subtree_end_of(SHAPES["chain"](size)))
    causal = torch.nn.functional.scaled_dot_product_attention(
        *(t.transpose(0, 1)[None] for t in qkv), is_causal=True, enable_gqa=True
    )[0].transpose(0, 1)
    truth = tree_attention(*exact, layout, impl="reference")
    assert isinstance(truth, torch.Tensor)
    wanted = [truth, *torch.autograd.grad(truth, exact, grad)]
    yardstick = [causal, *torch.autograd.grad(causal, qkv, grad.to(dtype))]
    for return_lse in (False, True):
        result = tree_attention(*qkv, layout, return_lse=return_lse, impl="sdpa")
        out = result[0] if isinstance(result, tuple) else result
        assert out.dtype == dtype
        actual = [out, *torch.autograd.grad(out, qkv, grad.to(dtype))]
        for got, plain, true in zip(actual, yardstick, wanted, strict=True):
            assert (got.double() - true).norm() <= 2 * (plain.double() - true).norm()
