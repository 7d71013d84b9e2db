"""The compiled Triton kernels: within the dtype's rounding of float64, the same bits at every call, one compilation."""

from typing import Any

import pytest
import torch
from tree_shapes import SHAPES, chain, random_trie, subtree_end_of

pytest.importorskip("triton", reason="Triton is not installed")

from tree_kernels import TreeLayout, tree_attention

pytestmark = pytest.mark.gpu

# Relative error: a few roundings of 8, 11 and 24 bits.
ERROR = {torch.bfloat16: 6e-3, torch.float16: 1e-3, torch.float32: 2e-6}
SIZES = (1, 3, 63, 64, 65, 129, 1000)
EVERYTHING: dict[str, Any] = {"past": 77, "window": 33, "softcap": 2.0, "sinks": True, "lse": True, "scale": 0.2}
LATENT: dict[str, Any] = {"value_size": 128, "heads": (4, 4)}
"""With keys of 192: DeepSeek's heads."""
CASES: list[tuple[torch.dtype, int, dict[str, Any]]] = [
    *[(torch.bfloat16, head_size, {}) for head_size in (64, 128, 256)],
    (torch.bfloat16, 80, EVERYTHING),
    (torch.bfloat16, 128, EVERYTHING),
    (torch.bfloat16, 256, EVERYTHING),
    (torch.bfloat16, 128, {"heads": (7, 1), "past": 64}),
    (torch.bfloat16, 192, LATENT),
    (torch.bfloat16, 192, LATENT | EVERYTHING),
    (torch.bfloat16, 64, {"value_size": 96, "past": 77}),
    (torch.float32, 192, LATENT | {"past": 77}),
    (torch.float16, 64, {"heads": (8, 8)}),
    (torch.float16, 128, EVERYTHING),
    (torch.float32, 64, {}),
    (torch.float32, 128, EVERYTHING),
]


def leaves_of(
    size: int, heads: tuple[int, int], head_size: int, past: int, dtype: torch.dtype, *, value_size: int | None = None
) -> tuple[dict[str, torch.Tensor], torch.Tensor, torch.Tensor]:
    """Inputs, and gradients of the output and of the log-sum-exp."""
    torch.manual_seed(size)
    q_heads, k_heads = heads
    value_size = value_size or head_size
    shapes = {"q": (size, q_heads, head_size), "k": (size, k_heads, head_size), "v": (size, k_heads, value_size)}
    if past:
        shapes |= {"past_k": (past, k_heads, head_size), "past_v": (past, k_heads, value_size)}
    shapes |= {"sinks": (q_heads,), "grad": (size, q_heads, value_size), "grad_lse": (size, q_heads)}
    tensors = {name: torch.randn(shape, device="cuda").to(dtype) for name, shape in shapes.items()}
    grad, grad_lse = tensors.pop("grad"), tensors.pop("grad_lse").float()
    return {name: t.requires_grad_() for name, t in tensors.items()}, grad, grad_lse


def run(
    impl: str,
    leaves: dict[str, torch.Tensor],
    layout: TreeLayout,
    grad: torch.Tensor,
    grad_lse: torch.Tensor,
    *,
    lse: bool = False,
    sinks: bool = False,
    **options: Any,
) -> list[torch.Tensor]:
    """Output, log-sum-exp and the gradients of all that was used."""
    given = {name: t for name, t in leaves.items() if name not in ("q", "k", "v") and (sinks or name != "sinks")}
    out, got_lse = tree_attention(
        leaves["q"], leaves["k"], leaves["v"], layout, impl=impl, return_lse=True, **given, **options
    )
    loss = (out * grad.to(out.dtype)).sum()
    if lse:
        loss = loss + (got_lse * grad_lse.to(got_lse.dtype)).sum()
    used = [leaves["q"], leaves["k"], leaves["v"], *given.values()]
    return [out.detach(), got_lse.detach(), *torch.autograd.grad(loss, used)]


def relative_error(actual: torch.Tensor, expected: torch.Tensor) -> float:
    """Of root mean squares; what is small or zero in theory is judged against the inputs, which are of order one."""
    assert actual.shape == expected.shape and actual.isfinite().all()
    error = (actual.double() - expected).square().mean().sqrt()
    return float(error / expected.square().mean().sqrt().clamp(min=1.0))


def layout_of(parent: list[int], past: int = 0) -> TreeLayout:
    return TreeLayout.from_subtree_end(subtree_end_of(parent), past_length=past).to("cuda")


@pytest.mark.parametrize(("dtype", "head_size", "options"), CASES)
def test_outputs_and_gradients_equal_the_float64_reference(
    dtype: torch.dtype, head_size: int, options: dict[str, Any]
) -> None:
    options = dict(options)
    heads, past, value_size = options.pop("heads", (4, 2)), options.pop("past", 0), options.pop("value_size", None)
    for size in SIZES:
        for shape in ("forest", "comb"):
            leaves, grad, grad_lse = leaves_of(size, heads, head_size, past, dtype, value_size=value_size)
            exact = {name: t.detach().double().requires_grad_() for name, t in leaves.items()}
            layout = layout_of(SHAPES[shape](size), past)
            actual = run("triton", leaves, layout, grad, grad_lse, **options)
            wanted = run("reference", exact, layout, grad, grad_lse, **options)
            for index, (got, expected) in enumerate(zip(actual, wanted, strict=True)):
                assert relative_error(got, expected) < (2e-6 if index == 1 else ERROR[dtype]), (size, shape, index)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_it_is_no_further_from_float64_than_plain_causal_attention(dtype: torch.dtype) -> None:
    """On a chain both solve one problem, so torch's own error in the dtype is the yardstick (twice it, for order)."""
    size = 3000
    leaves, grad, grad_lse = leaves_of(size, (8, 2), 128, 0, dtype)
    exact = {name: t.detach().double().requires_grad_() for name, t in leaves.items()}
    layout = layout_of(chain(size))
    qkv = [leaves[name] for name in ("q", "k", "v")]
    plain = torch.nn.functional.scaled_dot_product_attention(
        *(t.transpose(0, 1)[None] for t in qkv), is_causal=True, enable_gqa=True
    )[0].transpose(0, 1)
    yardstick = [plain.detach(), *torch.autograd.grad(plain, qkv, grad)]
    out, _, *gradients = run("triton", leaves, layout, grad, grad_lse)
    true_out, _, *true_gradients = run("reference", exact, layout, grad, grad_lse)
    for got, other, true in zip([out, *gradients], yardstick, [true_out, *true_gradients], strict=True):
        assert (got.double() - true).norm() <= 2 * (other.double() - true).norm()


def test_the_same_bits_come_out_at_every_call() -> None:
    """Also of keys seen by a whole forest of short branches, whose gradients are summed from pieces."""
    size = 20000
    leaves, grad, grad_lse = leaves_of(size, (8, 2), 128, 500, torch.bfloat16)
    layout = layout_of(random_trie(size, 0, branching=0.02), 500)
    first = run("triton", leaves, layout, grad, grad_lse, lse=True, sinks=True)
    for _ in range(3):
        again = run("triton", leaves, layout, grad, grad_lse, lse=True, sinks=True)
        assert all(torch.equal(one, two) for one, two in zip(first, again, strict=True))


def test_new_lengths_compile_nothing() -> None:
    from tree_kernels.tree_attention.triton_kernels.forward_kernel import forward_kernel
    from tree_kernels.tree_attention.triton_kernels.key_gradient_kernels import key_gradient_kernel, sum_pieces_kernel
    from tree_kernels.tree_attention.triton_kernels.query_gradient_kernels import query_gradient_kernel, row_term_kernel

    kernels = (forward_kernel, row_term_kernel, query_gradient_kernel, key_gradient_kernel, sum_pieces_kernel)
    compiled = []
    for size, past in ((1, 0), (16, 1), (17, 16), (1000, 77), (4096, 128), (4097, 0)):
        leaves, grad, grad_lse = leaves_of(size, (4, 2), 64, past, torch.bfloat16)
        run("triton", leaves, layout_of(chain(size), past), grad, grad_lse)
        compiled.append([len(kernel.device_caches[torch.cuda.current_device()][0]) for kernel in kernels])
    assert compiled[0] == compiled[-1]


def test_nothing_waits_for_the_device() -> None:
    leaves, grad, grad_lse = leaves_of(500, (4, 2), 64, 30, torch.bfloat16)
    layouts = [layout_of(SHAPES["forest"](500), 30) for _ in range(2)]
    run("triton", leaves, layouts[0], grad, grad_lse)
    torch.cuda.set_sync_debug_mode("error")
    try:
        run("triton", leaves, layouts[1], grad, grad_lse)
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
