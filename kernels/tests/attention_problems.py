"""Inputs of tree attention in every shape, and what an implementation makes of them: outputs and all gradients."""

from collections.abc import Callable
from typing import Any

import torch
from hypothesis import strategies as st

from tree_kernels import TreeLayout, tree_attention
from tree_kernels.tree_attention.fa4.fa4_plan import Fa4Plan

Tensors = dict[str, torch.Tensor]
EVERYTHING: dict[str, Any] = {"window": 9, "softcap": 1.3, "sinks": True, "past": 20, "scale": 0.4, "lse": True}
"""Options together."""
ANY_OPTIONS = st.fixed_dictionaries(
    {
        "past": st.integers(0, 40),
        "window": st.one_of(st.none(), st.integers(1, 40)),
        "softcap": st.one_of(st.none(), st.just(1.0)),
        "sinks": st.booleans(),
    }
)


def problem(
    size: int,
    heads: tuple[int, int],
    head_size: int,
    past: int,
    dtype: torch.dtype,
    *,
    value_size: int | None = None,
    device: str = "cpu",
) -> tuple[Tensors, Tensors]:
    """Leaves in `dtype`, and gradients of the output and of the log-sum-exp; a past of 0 tokens is a tensor too."""
    generator = torch.Generator().manual_seed(size)
    q_heads, k_heads = heads
    value_size = value_size or head_size
    shapes: dict[str, tuple[int, ...]] = {"q": (size, q_heads, head_size)}
    for name, width in (("k", head_size), ("v", value_size)):
        shapes |= {name: (size, k_heads, width), f"past_{name}": (past, k_heads, width)}
    shapes |= {"sinks": (q_heads,), "out": (size, q_heads, value_size), "lse": (size, q_heads)}
    exact = dtype if dtype == torch.float64 else torch.float32
    drawn = {name: torch.randn(shape, generator=generator, dtype=exact).to(device) for name, shape in shapes.items()}
    grads = {"out": drawn.pop("out").to(dtype), "lse": drawn.pop("lse")}
    return {name: t.to(dtype).requires_grad_() for name, t in drawn.items()}, grads


def in_float64(leaves: Tensors) -> Tensors:
    return {name: t.detach().double().requires_grad_() for name, t in leaves.items()}


def by(impl: str, layout: TreeLayout, *, return_lse: bool = True) -> Callable[..., Any]:
    """An implementation of tree attention, for `outputs_and_gradients`."""
    return lambda *qkv, **given: tree_attention(*qkv, layout, impl=impl, return_lse=return_lse, **given)


def outputs_and_gradients(
    attend: Callable[..., Any],
    leaves: Tensors,
    grads: Tensors,
    *,
    sinks: bool = False,
    lse: bool = False,
    **options: Any,
) -> Tensors:
    """Output, log-sum-exp if there is one, and the gradients of all leaves that were used.

    `attend` takes q, k and v, and a past, sinks if asked for and options by name; `lse` makes the log-sum-exp part of
    the loss.
    """
    used = {name: t for name, t in leaves.items() if t.numel() and (sinks or name != "sinks")}
    given = {name: t for name, t in used.items() if name not in ("q", "k", "v")}
    result = attend(leaves["q"], leaves["k"], leaves["v"], **given, **options)
    out, got_lse = result if isinstance(result, tuple) else (result, None)
    loss = (out * grads["out"].to(out.dtype)).sum()
    if lse:
        loss = loss + (got_lse * grads["lse"].to(got_lse.dtype)).sum()
    found = {"out": out.detach()} | ({} if got_lse is None else {"lse": got_lse.detach()})
    return found | dict(zip(used, torch.autograd.grad(loss, list(used.values())), strict=True))


def seen_by_vectors(plan: Fa4Plan, queries: torch.Tensor, keys: torch.Tensor, past: int) -> torch.Tensor:
    """bool [queries, keys]: what flash-attn-4's compiled masks say of each pair."""
    own_key = queries[:, None] + past
    seen = (keys <= own_key) & (own_key < plan.ends[keys])
    if plan.window is not None:
        assert plan.key_depths is not None and plan.query_depths is not None
        seen &= plan.query_depths[queries][:, None] - plan.key_depths[keys] < plan.window
    return seen


def relative_error(actual: torch.Tensor, expected: torch.Tensor) -> float:
    """Of root mean squares; what is small or zero in theory is judged against the inputs, which are of order one."""
    assert actual.shape == expected.shape and actual.isfinite().all()
    error = (actual.detach().double() - expected.detach()).square().mean().sqrt()
    return float(error / expected.detach().square().mean().sqrt().clamp(min=1.0))
