"""On CUDA outputs and gradients stay within the rounding of the dtype of the float64 reference."""

from typing import Any

import pytest
import torch
from tree_shapes import SHAPES, subtree_end_of

from tree_kernels import TreeLayout, edge_log_probs, tree_attention

pytestmark = pytest.mark.gpu

# Relative error in norm: a few roundings of 8, 11 and 24 bits; float32 products on CUDA are exact (no TF32) here.
ERROR_PER_DTYPE = {torch.bfloat16: 1e-2, torch.float16: 2e-3, torch.float32: 1e-5, torch.float64: 1e-12}
OPTIONS: list[dict[str, Any]] = [
    {},
    {"past": 77},
    {"window": 33, "past": 77},
    {"softcap": 2.0},
    {"sinks": True},
    {"head_size": 80},
    {"head_size": 192, "value_size": 128, "past": 77},
]
CASES = [
    *[("flex", torch.bfloat16, option) for option in OPTIONS],
    ("flex", torch.float16, {}),
    ("flex", torch.float32, {}),
    ("flex", torch.float32, {"window": 33, "past": 77, "softcap": 2.0, "sinks": True}),
    ("sdpa", torch.bfloat16, {"past": 77}),
    ("sdpa", torch.float32, {"window": 33, "past": 77}),
    ("sdpa", torch.float64, {"softcap": 2.0, "sinks": True}),
]


def relative_error(actual: torch.Tensor, expected: torch.Tensor) -> float:
    assert actual.isfinite().all()
    # A gradient that is zero in theory (one token alone) is judged against the inputs, which are of order one.
    return float((actual.double() - expected).detach().norm() / expected.detach().norm().clamp(min=1.0))


@pytest.mark.parametrize(("impl", "dtype", "option"), CASES)
def test_attention_equals_the_float64_reference(impl: str, dtype: torch.dtype, option: dict[str, Any]) -> None:
    option = dict(option)
    past, head_size, sinks = option.pop("past", 0), option.pop("head_size", 64), option.pop("sinks", False)
    value_size = option.pop("value_size", head_size)
    for size in (1, 65, 129, 1000):
        torch.manual_seed(size)
        narrow = [(tokens, 2, width) for tokens in (size, past) for width in (head_size, value_size)]
        shapes = [(size, 4, head_size), *narrow, (4,)]
        rounded = [torch.randn(shape, device="cuda", dtype=dtype).requires_grad_() for shape in shapes]
        exact = [t.detach().double().requires_grad_() for t in rounded]
        grad = torch.randn(size, 4, value_size, device="cuda", dtype=dtype)
        layout = TreeLayout.from_subtree_end(subtree_end_of(SHAPES["forest"](size)), past_length=past).to("cuda")
        results = []
        for leaves, chosen in ((rounded, impl), (exact, "reference")):
            q, k, v, past_k, past_v, sink = leaves
            extra = {"past_k": past_k, "past_v": past_v} if past else {}
            out = tree_attention(q, k, v, layout, sinks=sink if sinks else None, impl=chosen, **extra, **option)
            assert isinstance(out, torch.Tensor)
            used = [t for t in leaves if t.numel() and (t is not sink or sinks)]
            results.append([out, *torch.autograd.grad(out, used, grad.to(out.dtype))])
        for actual, expected in zip(*results, strict=True):
            assert actual.dtype == dtype
            assert relative_error(actual, expected) < ERROR_PER_DTYPE[dtype], (size, actual.shape)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_edge_log_probs_equal_the_float64_reference(dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    rounded = [
        torch.randn(shape, device="cuda", dtype=dtype).requires_grad_() for shape in ((70, 64), (515, 64), (515,))
    ]
    exact = [t.detach().double().requires_grad_() for t in rounded]
    source, target = torch.randint(0, 70, (200,), device="cuda"), torch.randint(0, 515, (200,), device="cuda")
    results = []
    for (hidden, weight, bias), impl in ((rounded, "chunked"), (exact, "reference")):
        log_prob, entropy, _ = edge_log_probs(
            hidden, weight, source, target, bias=bias, temperature=0.7, entropy=True, impl=impl, chunk_rows=16
        )
        assert entropy is not None
        loss = (log_prob * 0.01).sum() + entropy.sum()
        results.append([log_prob, entropy, *torch.autograd.grad(loss, (hidden, weight, bias))])
    for index, (actual, expected) in enumerate(zip(*results, strict=True)):
        assert relative_error(actual, expected) < (1e-5 if index < 2 else ERROR_PER_DTYPE[dtype])
