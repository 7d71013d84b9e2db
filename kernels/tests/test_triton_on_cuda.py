"""On CUDA attention is within the dtype's rounding of float64; Triton's kernels give the same bits at every call, and
compile once."""

from functools import partial
from typing import Any

import pytest
import torch
from attention_problems import Tensors, by, in_float64, outputs_and_gradients, problem, relative_error
from recurrences import relative_error as relative_error_in_norm
from tree_shapes import SHAPES, chain, layout_of, random_trie

pytest.importorskip("triton", reason="Triton is not installed")

from tree_kernels import tree_attention

pytestmark = pytest.mark.gpu

# A gradient that is zero in theory (one token alone) is judged against the inputs, which are of order one.
in_norm = partial(relative_error_in_norm, smallest=1.0)
# A few roundings of 8, 11 and 24 bits; float32 products on CUDA are exact (no TF32) here.
PORTABLE = {torch.bfloat16: 1e-2, torch.float16: 2e-3, torch.float32: 1e-5, torch.float64: 1e-12}
ERRORS: dict[str, tuple[Any, dict[torch.dtype, float]]] = {
    "triton": (relative_error, {torch.bfloat16: 6e-3, torch.float16: 1e-3, torch.float32: 2e-6}),
    "flex": (in_norm, PORTABLE),
    "sdpa": (in_norm, PORTABLE),
}
"""How an implementation's error is measured, and its largest."""
SIZES = {"triton": (1, 3, 63, 64, 65, 129, 1000), "flex": (1, 65, 129, 1000), "sdpa": (1, 65, 129, 1000)}
EVERYTHING: dict[str, Any] = {"past": 77, "window": 33, "softcap": 2.0, "sinks": True, "lse": True, "scale": 0.2}
LATENT: dict[str, Any] = {"value_size": 128, "heads": (4, 4)}
"""With keys of 192: DeepSeek's heads."""
CASES: list[tuple[str, torch.dtype, int, dict[str, Any]]] = [
    *[("triton", torch.bfloat16, head_size, {}) for head_size in (64, 128, 256)],
    *[("triton", torch.bfloat16, head_size, EVERYTHING) for head_size in (80, 128, 256)],
    ("triton", torch.bfloat16, 128, {"heads": (7, 1), "past": 64}),
    ("triton", torch.bfloat16, 192, LATENT),
    ("triton", torch.bfloat16, 192, LATENT | EVERYTHING),
    ("triton", torch.bfloat16, 64, {"value_size": 96, "past": 77}),
    ("triton", torch.float32, 192, LATENT | {"past": 77}),
    ("triton", torch.float16, 64, {"heads": (8, 8)}),
    ("triton", torch.float16, 128, EVERYTHING),
    ("triton", torch.float32, 64, {}),
    ("triton", torch.float32, 128, EVERYTHING),
    *[("flex", dtype, 64, {}) for dtype in (torch.bfloat16, torch.float16, torch.float32)],
    *[("flex", torch.bfloat16, 64, option) for option in ({"past": 77}, {"softcap": 2.0}, {"sinks": True})],
    ("flex", torch.bfloat16, 64, {"window": 33, "past": 77}),
    ("flex", torch.bfloat16, 80, {}),
    ("flex", torch.bfloat16, 192, {"value_size": 128, "past": 77}),
    ("flex", torch.float32, 64, {"window": 33, "past": 77, "softcap": 2.0, "sinks": True}),
    ("sdpa", torch.bfloat16, 64, {"past": 77}),
    ("sdpa", torch.float32, 64, {"window": 33, "past": 77}),
    ("sdpa", torch.float64, 64, {"softcap": 2.0, "sinks": True}),
]


@pytest.mark.parametrize(("impl", "dtype", "head_size", "options"), CASES)
def test_outputs_and_gradients_equal_the_float64_reference(
    impl: str, dtype: torch.dtype, head_size: int, options: dict[str, Any]
) -> None:
    options, has_lse, (error_of, largest) = dict(options), impl == "triton", ERRORS[impl]
    heads, past, value_size = options.pop("heads", (4, 2)), options.pop("past", 0), options.pop("value_size", None)
    for size in SIZES[impl]:
        for shape in ("forest", "comb") if impl == "triton" else ("forest",):
            leaves, grads = problem(size, heads, head_size, past, dtype, value_size=value_size, device="cuda")
            layout = layout_of(SHAPES[shape](size), past).to("cuda")
            actual = outputs_and_gradients(by(impl, layout, return_lse=has_lse), leaves, grads, **options)
            reference = by("reference", layout, return_lse=has_lse)
            wanted = outputs_and_gradients(reference, in_float64(leaves), grads, **options)
            errors = {name: error_of(actual[name], expected) for name, expected in wanted.items()}
            if "sinks" in errors and has_lse:
                errors["sinks"] = error_of_sinks(actual, wanted, leaves, grads)
            for name, error in errors.items():
                assert actual[name].dtype == (torch.float32 if name == "lse" else dtype)
                assert error < (2e-6 if name == "lse" else largest[dtype]), (size, shape, name)


def error_of_sinks(actual: Tensors, wanted: Tensors, leaves: Tensors, grads: Tensors) -> float:
    """A sink's gradient is the sum of one term a token, which may cancel: its error is judged against their norm.

    The loss includes the log-sum-exp.
    """
    to_sink = torch.exp(leaves["sinks"].detach().double() - wanted["lse"])
    terms = to_sink * (grads["lse"].double() - (grads["out"].double() * wanted["out"]).sum(-1))
    torch.testing.assert_close(terms.sum(0), wanted["sinks"])
    error = (actual["sinks"].double() - wanted["sinks"]).square().mean().sqrt()
    return float(error / terms.square().sum(0).mean().sqrt().clamp(min=1.0))


def test_the_same_bits_come_out_at_every_call() -> None:
    """Also of keys seen by a whole forest of short branches, whose gradients are summed from pieces."""
    size = 20000
    leaves, grads = problem(size, (8, 2), 128, 500, torch.bfloat16, device="cuda")
    layout = layout_of(random_trie(size, 0, branching=0.02), 500).to("cuda")
    first = outputs_and_gradients(by("triton", layout), leaves, grads, lse=True, sinks=True)
    for _ in range(3):
        again = outputs_and_gradients(by("triton", layout), leaves, grads, lse=True, sinks=True)
        assert all(torch.equal(one, two) for one, two in zip(first.values(), again.values(), strict=True))


def test_new_lengths_compile_nothing() -> None:
    from tree_kernels.tree_attention.triton_kernels.forward_kernel import forward_kernel
    from tree_kernels.tree_attention.triton_kernels.key_gradient_kernels import key_gradient_kernel, sum_pieces_kernel
    from tree_kernels.tree_attention.triton_kernels.query_gradient_kernels import query_gradient_kernel, row_term_kernel

    kernels = (forward_kernel, row_term_kernel, query_gradient_kernel, key_gradient_kernel, sum_pieces_kernel)
    compiled = []
    for size, past in ((1, 0), (16, 1), (17, 16), (1000, 77), (4096, 128), (4097, 0)):
        leaves, grads = problem(size, (4, 2), 64, past, torch.bfloat16, device="cuda")
        outputs_and_gradients(by("triton", layout_of(chain(size), past).to("cuda")), leaves, grads)
        compiled.append([len(kernel.device_caches[torch.cuda.current_device()][0]) for kernel in kernels])
    assert compiled[0] == compiled[-1]


def test_nothing_waits_for_the_device() -> None:
    leaves, grads = problem(500, (4, 2), 64, 30, torch.bfloat16, device="cuda")
    layouts = [layout_of(SHAPES["forest"](500), 30).to("cuda") for _ in range(2)]
    outputs_and_gradients(by("triton", layouts[0]), leaves, grads)
    torch.cuda.set_sync_debug_mode("error")
    try:
        outputs_and_gradients(by("triton", layouts[1]), leaves, grads)
    finally:
        torch.cuda.set_sync_debug_mode("default")


def test_tensors_of_more_than_two_to_the_31_numbers() -> None:
    """With a window of 1 a token sees itself alone, so the truth is known without computing it."""
    size, heads, head_size = 135_000, 64, 256
    if torch.cuda.mem_get_info()[0] < 60 * 2**30:
        pytest.skip("needs 60 GiB of free device memory")
    assert size * heads * head_size > 2**31
    torch.manual_seed(0)
    q = torch.zeros(size, heads, head_size, device="cuda", dtype=torch.bfloat16, requires_grad=True)
    k = torch.zeros(size, 1, head_size, device="cuda", dtype=torch.bfloat16, requires_grad=True)
    v = torch.randn(size, 1, head_size, device="cuda", dtype=torch.bfloat16).requires_grad_()
    end = torch.full((size,), size, dtype=torch.int32, device="cuda")
    out = tree_attention(q, k, v, end, window=1, impl="triton")
    assert isinstance(out, torch.Tensor)
    assert all(torch.equal(out[:, head], v[:, 0]) for head in (0, 63))
    grad_q, grad_k, grad_v = torch.autograd.grad(out, (q, k, v), torch.ones_like(out))
    assert not grad_q[-1000:].any() and not grad_k.any()
    assert torch.equal(grad_v, torch.full_like(grad_v, heads))
