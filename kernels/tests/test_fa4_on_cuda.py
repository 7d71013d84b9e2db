"""On Hopper flash-attn-4 is as near to float64 as our portable kernel, and one compilation serves all lengths."""

from typing import Any

import pytest
import torch
from tree_shapes import SHAPES, layout_of, paths_of, rows, rows_below

from tree_kernels import TreeLayout, tree_attention, unavailable_reason
from tree_kernels.tree_attention.fa4.fa4_plan import VALUE_SIZES, rows_worth_copying
from tree_kernels.tree_attention.fa4.head_sections import SECTION

pytestmark = pytest.mark.gpu

SIZES = (1, 3, 63, 64, 65, 129, 1000, 5000)
PASTS = (0, 1, 77, 1234)
RATIOS = (1, 2, 4, 8)
SHARE_NOTHING = (rows(193), rows(5000), rows(1, 2, 300, 64, 129, 1), rows(1000, 77), rows(*(3,) * 300))
"""Beyond 256 rows flash-attn-4 finds a block's row by other kernels."""
SHARE_LITTLE = (rows_below(1, 900, 801), rows_below(130, 600, 557, 601), rows_below(400, 2000, 1999, 2100, 3))
SLACK = 1.25
"""Another order of summation may cost a little; a wrong pair, scale or rounding costs far more."""


@pytest.fixture(autouse=True)
def _can_run(request: pytest.FixtureRequest) -> None:
    """Skips what the installed version refuses, such as a head size."""
    head_size = request.node.callspec.params.get("head_size", 128) if hasattr(request.node, "callspec") else 128
    sizes = {"head_size": head_size, "value_size": VALUE_SIZES[head_size]}
    reason = unavailable_reason("fa4", device=torch.device("cuda"), dtype=torch.bfloat16, **sizes)
    if reason is not None:
        pytest.skip(reason)


def case(size: int, past: int, ratio: int, head_size: int, dtype: torch.dtype) -> tuple[TreeLayout, list[torch.Tensor]]:
    """A layout, and q, k, v, past_k, past_v and the gradient of the output."""
    layout = layout_of(SHAPES["forest" if size % 2 else "trunk_and_stubs"](size), past).to("cuda")
    return layout, inputs(size, past, ratio, head_size, dtype)


def case_of_rows(parent: list[int], ratio: int, head_size: int) -> tuple[TreeLayout, list[torch.Tensor]]:
    """As `case`, without a past, of rows that share nothing, or little and run over copied keys."""
    layout = layout_of(parent).to("cuda")
    found = rows_worth_copying(layout, None)
    assert found is not None and (found.copies is None) == (len(paths_of(parent)) == parent.count(-1))
    return layout, inputs(len(parent), 0, ratio, head_size, torch.bfloat16)


def inputs(
    size: int, past: int, ratio: int, head_size: int, dtype: torch.dtype, *, value_size: int | None = None
) -> list[torch.Tensor]:
    """q, k, v, past_k, past_v and the gradient of the output; values of their largest size unless one is given."""
    torch.manual_seed(size + past)
    key_heads, value_size = 2, value_size or VALUE_SIZES[head_size]
    narrow = [(tokens, key_heads, width) for tokens in (size, past) for width in (head_size, value_size)]
    shapes = [(size, ratio * key_heads, head_size), *narrow, (size, ratio * key_heads, value_size)]
    return [torch.randn(shape, device="cuda", dtype=dtype) for shape in shapes]


def run(layout: TreeLayout, tensors: list[torch.Tensor], impl: str, **options: Any) -> dict[str, torch.Tensor]:
    """Output and gradients in float64, by name."""
    names = ("q", "k", "v", "past_k", "past_v") if layout.past_length else ("q", "k", "v")
    leaves = {name: t.detach().clone().requires_grad_() for name, t in zip(names, tensors, strict=False)}
    given = dict(leaves)
    if impl == "triton" and leaves["v"].shape[-1] != leaves["k"].shape[-1]:
        # As for FA4, whose backward then shares no key heads: gradients are rounded by query head, then summed.
        ratio = tensors[0].shape[1] // tensors[1].shape[1]
        given |= {name: leaf.repeat_interleave(ratio, dim=1) for name, leaf in leaves.items() if name != "q"}
    q, k, v = (given.pop(name) for name in "qkv")
    out = tree_attention(q, k, v, layout, **given, impl=impl, **options)
    assert isinstance(out, torch.Tensor)
    grads = torch.autograd.grad(out, list(leaves.values()), tensors[5].to(out.dtype))
    named = {"out": out} | dict(zip(leaves, grads, strict=True))
    assert all(t.isfinite().all() for t in named.values())
    return {name: t.detach().double() for name, t in named.items()}


def errors(actual: dict[str, torch.Tensor], exact: dict[str, torch.Tensor]) -> dict[str, float]:
    """Relative error in norm; a result that is zero in theory is judged against the inputs, which are of order one."""
    return {name: float((actual[name] - exact[name]).norm() / exact[name].norm().clamp(min=1.0)) for name in exact}


def check(layout: TreeLayout, tensors: list[torch.Tensor], **options: Any) -> None:
    exact = run(layout, [t.double() for t in tensors], "reference", **options)
    own = errors(run(layout, tensors, "fa4", **options), exact)
    yardstick = errors(run(layout, tensors, "triton", **options), exact)
    roundings = torch.finfo(tensors[0].dtype).eps / 4
    for name, error in own.items():
        assert error <= max(SLACK * yardstick[name], roundings), (name, error, yardstick[name], layout, options)


@pytest.mark.parametrize("head_size", [64, 128, 192, 256])
@pytest.mark.parametrize("ratio", RATIOS)
def test_outputs_and_gradients_are_as_near_to_float64_as_the_portable_kernel(ratio: int, head_size: int) -> None:
    for place, size in enumerate(SIZES):
        past = PASTS[(place + RATIOS.index(ratio)) % len(PASTS)]
        check(*case(size, past, ratio, head_size, torch.bfloat16))


@pytest.mark.parametrize("head_size", [128, 192])
@pytest.mark.parametrize("value_size", [64, 112])
def test_values_smaller_than_the_kernels_are_padded(value_size: int, head_size: int) -> None:
    layout, _ = case(1000, 77, 1, head_size, torch.bfloat16)
    check(layout, inputs(1000, 77, 1, head_size, torch.bfloat16, value_size=value_size))


@pytest.mark.parametrize("head_size", [64, 128])
def test_heads_that_do_not_fill_the_last_section(head_size: int) -> None:
    heads = 2 * 5
    assert heads > SECTION and heads % SECTION
    for size, past in ((1000, 0), (5000, 1234)):
        check(*case(size, past, 5, head_size, torch.bfloat16))


def test_flash_attentions_own_kernels_keep_their_order() -> None:
    from flash_attn.cute import flash_bwd_sm90, tile_scheduler

    check(*case(300, 0, 2, 128, torch.bfloat16))
    assert flash_bwd_sm90.SingleTileScheduler is tile_scheduler.SingleTileScheduler


@pytest.mark.parametrize(("ratio", "head_size"), [(1, 64), (2, 128), (4, 256), (8, 128), (1, 192)])
def test_rows_that_share_nothing_or_little_are_as_near_to_float64(ratio: int, head_size: int) -> None:
    for parent in (*SHARE_NOTHING, *SHARE_LITTLE):
        check(*case_of_rows(parent, ratio, head_size))


def test_rows_that_share_nothing_run_the_rows_kernel_bit_for_bit() -> None:
    from flash_attn.cute import flash_attn_varlen_func

    layout, tensors = case_of_rows(rows(700, 1300, 40), 4, 128)
    q, k, v = tensors[:3]
    offsets = torch.tensor([0, 700, 2000, 2040], dtype=torch.int32, device="cuda")
    expected = flash_attn_varlen_func(
        q, k, v, cu_seqlens_q=offsets, cu_seqlens_k=offsets, max_seqlen_q=1300, max_seqlen_k=1300, causal=True
    )
    expected = expected[0] if isinstance(expected, tuple) else expected
    assert torch.equal(tree_attention(q, k, v, layout, impl="fa4"), expected)


@pytest.mark.parametrize("parent", [rows(700, 1300, 40), SHARE_LITTLE[1]], ids=("nothing_shared", "little_shared"))
def test_rows_never_wait_for_the_device(parent: list[int]) -> None:
    layout, tensors = case_of_rows(parent, 4, 128)
    q, k, v = (t.detach().requires_grad_() for t in tensors[:3])

    def step() -> None:
        out = tree_attention(q, k, v, layout, impl="fa4")
        assert isinstance(out, torch.Tensor)
        out.backward(tensors[5])

    step()
    torch.cuda.set_sync_debug_mode("error")
    try:
        step()
    finally:
        torch.cuda.set_sync_debug_mode("default")


@pytest.mark.parametrize("head_size", [64, 128])
@pytest.mark.parametrize("past", PASTS)
def test_float16_is_as_near_to_float64_as_the_portable_kernel(past: int, head_size: int) -> None:
    for size in (3, 129, 1000):
        check(*case(size, past, 2, head_size, torch.float16))


@pytest.mark.parametrize("head_size", [64, 128, 192])
@pytest.mark.parametrize("window", [1, 33, 700])
def test_a_window_counts_depth(window: int, head_size: int) -> None:
    for size, past, ratio in ((3, 1, 2), (129, 77, 4), (1000, 0, 8), (5000, 1234, 4)):
        check(*case(size, past, ratio, head_size, torch.bfloat16), window=window)


@pytest.mark.parametrize("ratio", [1, 5])
def test_strided_and_expanded_inputs_serve(ratio: int) -> None:
    layout, tensors = case(300, 0, ratio, 128, torch.bfloat16)
    q, k, v = tensors[:3]
    expected = tree_attention(q, k, v, layout, impl="fa4")
    transposed = (t.transpose(0, 1).contiguous().transpose(0, 1) for t in (q, k, v))
    assert torch.equal(tree_attention(*transposed, layout, impl="fa4"), expected)
    one_head = k[:, :1].expand_as(k)
    assert torch.equal(
        tree_attention(q, one_head, v, layout, impl="fa4"), tree_attention(q, one_head.clone(), v, layout, impl="fa4")
    )


def test_one_head_serves() -> None:
    layout, tensors = case(300, 77, 1, 128, torch.bfloat16)
    one_head = [t[:, :1] for t in tensors]
    exact = run(layout, [t.double() for t in one_head], "reference")
    assert max(errors(run(layout, one_head, "fa4"), exact).values()) < 4e-3


def test_no_length_compiles_anything() -> None:
    from flash_attn.cute import interface

    passes = (interface._flash_attn_fwd, interface._flash_attn_bwd)
    around = (interface._bwd_preprocess, interface._bwd_postprocess_convert)
    caches = [function.compile_cache.cache for function in (*passes, *around)]
    run(*case(1000, 0, 4, 128, torch.bfloat16), "fa4")
    run(*case_of_rows(rows(500, 500), 4, 128), "fa4")
    compiled = [set(cache) for cache in caches]
    for size in (1, 2, 64, 128, 129, 255, 4096, 7777):
        for past in (0, 5, 128):
            run(*case(size, past, 4, 128, torch.bfloat16), "fa4")
    for parent in (rows(193), rows(1, 300), rows(7777), rows(*(20,) * 256), SHARE_LITTLE[1]):
        run(*case_of_rows(parent, 4, 128), "fa4")
    assert [set(cache) for cache in caches] == compiled
