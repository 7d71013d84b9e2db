"""On CUDA outputs and gradients stay within the rounding of the dtype of the float64 reference."""

from functools import partial
from typing import Any

import pytest
import torch
from attention_problems import by, in_float64, outputs_and_gradients, problem
from recurrences import relative_error as relative_error_in_norm
from tree_shapes import SHAPES, subtree_end_of

from tree_kernels import TreeLayout, edge_log_probs

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


# A gradient that is zero in theory (one token alone) is judged against the inputs, which are of order one.
relative_error = partial(relative_error_in_norm, smallest=1.0)


@pytest.mark.parametrize(("impl", "dtype", "option"), CASES)
def test_attention_equals_the_float64_reference(impl: str, dtype: torch.dtype, option: dict[str, Any]) -> None:
    option = dict(option)
    past, head_size, sinks = option.pop("past", 0), option.pop("head_size", 64), option.pop("sinks", False)
    value_size = option.pop("value_size", head_size)
    for size in (1, 65, 129, 1000):
        leaves, grads = problem(size, (4, 2), head_size, past, dtype, value_size=value_size, device="cuda")
        layout = TreeLayout.from_subtree_end(subtree_end_of(SHAPES["forest"](size)), past_length=past).to("cuda")
        actual = outputs_and_gradients(by(impl, layout, return_lse=False), leaves, grads, sinks=sinks, **option)
        wanted = outputs_and_gradients(
            by("reference", layout, return_lse=False), in_float64(leaves), grads, sinks=sinks, **option
        )
        for name, expected in wanted.items():
            assert actual[name].dtype == dtype
            assert relative_error(actual[name], expected) < ERROR_PER_DTYPE[dtype], (size, name)


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
