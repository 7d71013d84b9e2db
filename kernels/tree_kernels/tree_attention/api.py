"""tree_attention: softmax attention of a forest's unique tokens, each over itself and its ancestors.

Token i sees token j iff j <= i < subtree_end[j], and the whole past. See kernels/README.md.
Legend: N unique tokens, P past tokens, M = P + N keys, H heads, D head size of queries and keys, E of values.
"""

from typing import Any

import torch

from tree_kernels.accumulation import in_autocast_dtype
from tree_kernels.argument_checks import check_heads, check_one_device
from tree_kernels.implementation import UnsupportedImplementation, check_implementation
from tree_kernels.tree_attention.auto_order import BEST_KNOWN_FIRST, order_on_hopper
from tree_kernels.tree_attention.fa4.autograd import fa4_attention_of_tree, fa4_unavailable_reason
from tree_kernels.tree_attention.fa4.fa4_plan import rows_worth_copying
from tree_kernels.tree_attention.portable.blocked import blocked_attention
from tree_kernels.tree_attention.portable.flex import flex_attention_of_tree, flex_unavailable_reason
from tree_kernels.tree_attention.reference import reference_attention
from tree_kernels.tree_attention.score_rule import ScoreRule
from tree_kernels.tree_attention.triton_kernels.sizes import measured_on, triton_unavailable_reason
from tree_kernels.tree_layout import TreeLayout

OP = "tree_attention"
IMPLEMENTATIONS = ("reference", "sdpa", "flex", "triton", "fa4")


def unavailable_reason(
    impl: str,
    *,
    device: torch.device,
    dtype: torch.dtype,
    head_size: int,
    value_size: int | None = None,
    softcap: float | None = None,
    needs_lse: bool = False,
    deterministic: bool = False,
) -> str | None:
    """Why `impl` cannot run on this device, dtype and head size with these options, or None if it can.

    Arguments as in `tree_attention`; `value_size` None is that of the keys; `needs_lse` is True if sinks are given or
    the log-sum-exp is returned.

    Raises:
        ValueError: there is no implementation of that name.
    """
    check_implementation(impl, IMPLEMENTATIONS)
    if impl == "fa4":
        return fa4_unavailable_reason(
            device, dtype, head_size, value_size=value_size, softcap=softcap, needs_lse=needs_lse,
            deterministic=deterministic,
        )  # fmt: skip
    largest = max(head_size, value_size or 0)
    if impl == "flex":
        return flex_unavailable_reason(device, dtype, largest, deterministic=deterministic)
    if impl == "triton":
        return triton_unavailable_reason(device, dtype, largest)
    return None


def chosen_implementation(
    *,
    device: torch.device,
    dtype: torch.dtype,
    head_size: int,
    value_size: int | None = None,
    softcap: float | None = None,
    needs_lse: bool = False,
    deterministic: bool = False,
    partial_share: float | None = None,
) -> str:
    """The implementation that `impl="auto"` runs: on CUDA the fastest that can run there, sdpa elsewhere.

    Arguments as in `unavailable_reason`. `partial_share` is as in `TreeLayout`; None assumes large segments, the usual
    case.
    """
    order: tuple[str, ...] = ()
    if device.type == "cuda":
        on_hopper = order_on_hopper(head_size=head_size, partial_share=partial_share)
        order = on_hopper if measured_on(device) else BEST_KNOWN_FIRST
    for impl in order:
        reason = unavailable_reason(
            impl, device=device, dtype=dtype, head_size=head_size, value_size=value_size, softcap=softcap,
            needs_lse=needs_lse, deterministic=deterministic,
        )  # fmt: skip
        if reason is None:
            return impl
    return "sdpa"


def tree_attention(
    q_NHD: torch.Tensor,
    k_NHD: torch.Tensor,
    v_NHD: torch.Tensor,
    layout: TreeLayout | torch.Tensor,
    *,
    past_k: torch.Tensor | None = None,
    past_v: torch.Tensor | None = None,
    scale: float | None = None,
    window: int | None = None,
    softcap: float | None = None,
    sinks: torch.Tensor | None = None,
    impl: str = "auto",
    deterministic: bool = False,
    return_lse: bool = False,
) -> torch.Tensor | tuple[torch.Tensor, torch.Tensor]:
    """Attention of every unique token over the tokens on its path.

    Args:
        q_NHD: [N, Hq, D], DFS order.
        k_NHD: [N, Hkv, D]; Hq is a multiple of Hkv.
        v_NHD: [N, Hkv, E]; E is D, or another size as in multi-head latent attention.
        layout: the forest, or its `subtree_end` [N].
        past_k: [P, Hkv, D] keys of the ancestors of the whole forest, visible to every token.
        past_v: [P, Hkv, E].
        scale: factor on the scores; None: D ** -0.5.
        window: a token at depth d sees only keys of depth > d - window; the past has depths 0 .. P-1.
        softcap: c in c * tanh(score / c), applied to the scaled score.
        sinks: [Hq] learned logits that join each softmax denominator.
        impl: "auto", or one of `IMPLEMENTATIONS`.
        deterministic: require bitwise reproducible outputs and gradients.
        return_lse: also return the log of the softmax denominator.

    Returns:
        output [N, Hq, E] in q's dtype; with `return_lse` also [N, Hq] in float32 (float64 for float64 input),
        natural logarithm, sinks included, differentiable.

    Raises:
        ValueError: shapes, dtypes or options do not fit.
        UnsupportedImplementation: `impl` cannot run on this device or dtype, or with these options.
    """
    past_length = 0 if past_k is None else past_k.shape[0]
    if isinstance(layout, torch.Tensor):
        layout = TreeLayout.from_subtree_end(layout, past_length=past_length)
    q_NHD, k_NHD, v_NHD = (in_autocast_dtype(t) for t in (q_NHD, k_NHD, v_NHD))
    past_k, past_v = (None if t is None else in_autocast_dtype(t) for t in (past_k, past_v))
    _check(q_NHD, k_NHD, v_NHD, layout, past_k, past_v)
    _check_options(q_NHD, window, softcap, sinks)
    wanted: dict[str, Any] = {"device": q_NHD.device, "dtype": q_NHD.dtype, "head_size": q_NHD.shape[-1]}
    wanted |= {
        "value_size": v_NHD.shape[-1],
        "softcap": softcap,
        "needs_lse": return_lse or sinks is not None,
        "deterministic": deterministic,
    }
    if impl == "auto":
        impl = chosen_implementation(**wanted, partial_share=_share_to_choose_by(layout, window))
    elif reason := unavailable_reason(impl, **wanted):
        raise UnsupportedImplementation(OP, impl, reason)
    k_MHD = k_NHD if past_k is None else torch.cat([past_k, k_NHD])
    v_MHD = v_NHD if past_v is None else torch.cat([past_v, v_NHD])
    rule = ScoreRule(scale=q_NHD.shape[-1] ** -0.5 if scale is None else float(scale), window=window, softcap=softcap)
    lse_NH: torch.Tensor | None = None
    with torch.autocast(q_NHD.device.type, enabled=False):
        if impl == "reference":
            out_NHD, lse_NH = reference_attention(q_NHD, k_MHD, v_MHD, sinks, layout, rule)
        elif impl == "fa4":
            out_NHD = fa4_attention_of_tree(q_NHD, k_MHD, v_MHD, layout, rule)
        elif impl == "flex":
            out_NHD, lse_NH = flex_attention_of_tree(q_NHD, k_MHD, v_MHD, sinks, layout, rule)
        elif impl == "triton":
            # Imported late, because Triton is optional and reads TRITON_INTERPRET on import.
            from tree_kernels.tree_attention.triton_kernels.autograd import triton_attention

            out_NHD, lse_NH = triton_attention(q_NHD, k_MHD, v_MHD, sinks, layout, rule)
        else:
            out_NHD, lse_NH = blocked_attention(q_NHD, k_MHD, v_MHD, sinks, layout, rule, return_lse=return_lse)
    if not return_lse:
        return out_NHD
    assert lse_NH is not None
    return out_NHD, lse_NH


def _share_to_choose_by(layout: TreeLayout, window: int | None) -> float | None:
    """The layout's share of partly visible blocks; None with a window, which it does not count, and for leaf rows."""
    share = layout.partial_share
    if share is None or window is not None or rows_worth_copying(layout, window) is not None:
        return None
    return share


def _check(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    layout: TreeLayout,
    past_k: torch.Tensor | None,
    past_v: torch.Tensor | None,
) -> None:
    if q.dim() != 3 or k.dim() != 3 or v.dim() != 3 or v.shape[:2] != k.shape[:2]:
        raise ValueError(
            f"{OP}: expected q [N, Hq, D], k [N, Hkv, D] and v [N, Hkv, E], received q {tuple(q.shape)}, "
            f"k {tuple(k.shape)}, v {tuple(v.shape)}"
        )
    num_tokens, heads, size = q.shape
    if k.shape[0] != num_tokens or k.shape[2] != size or layout.num_tokens != num_tokens:
        raise ValueError(
            f"{OP}: expected N tokens and one head size of q and k, received q {tuple(q.shape)}, k {tuple(k.shape)}, "
            f"layout of {layout.num_tokens} tokens"
        )
    check_heads(OP, heads, k.shape[1], ("Hq", "Hkv"))
    if (past_k is None) != (past_v is None):
        raise ValueError(f"{OP}: expected past_k and past_v together, received only one of them")
    past_length = 0
    if past_k is not None and past_v is not None:
        past_length = past_k.shape[0]
        expected = (past_length, *k.shape[1:]), (past_length, *v.shape[1:])
        received = tuple(past_k.shape), tuple(past_v.shape)
        if received != expected:
            raise ValueError(f"{OP}: expected past_k and past_v {expected}, received {received}")
    if past_length != layout.past_length:
        raise ValueError(
            f"{OP}: expected a past of {layout.past_length} tokens (the layout's past_length), received {past_length}"
        )
    check_one_device(OP, layout, q=q, k=k, v=v, past_k=past_k, past_v=past_v)
    dtypes = [t.dtype for t in (q, k, v, past_k, past_v) if t is not None]
    if len(set(dtypes)) > 1:
        raise ValueError(f"{OP}: expected one dtype, received {', '.join(map(str, dtypes))}")


def _check_options(q: torch.Tensor, window: int | None, softcap: float | None, sinks: torch.Tensor | None) -> None:
    if not q.is_floating_point():
        raise ValueError(f"{OP}: expected a floating point dtype, received {q.dtype}")
    if window is not None and window < 1:
        raise ValueError(f"{OP}: expected window >= 1, received {window}")
    if softcap is not None and softcap <= 0:
        raise ValueError(f"{OP}: expected softcap > 0, received {softcap}")
    if sinks is not None and sinks.shape != (q.shape[1],):
        raise ValueError(f"{OP}: expected sinks [{q.shape[1]}], received {tuple(sinks.shape)}")
