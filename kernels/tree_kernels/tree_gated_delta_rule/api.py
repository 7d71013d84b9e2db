"""tree_gated_delta_rule: the recurrence of Gated DeltaNet in which every token starts from the state of its parent.

Each token is computed once. See kernels/README.md.
Legend: N unique tokens, Hk key heads, Hv value heads, K and V state sizes, S requested states.
"""

import torch

from tree_kernels.argument_checks import check_heads, check_one_device, check_tokens, initial_state_or_zeros
from tree_kernels.implementation import check_implementation, implementation_to_run
from tree_kernels.parents import parents_of
from tree_kernels.tree_gated_delta_rule.portable.chunked import chunked_delta_rule
from tree_kernels.tree_gated_delta_rule.reference import reference_delta_rule
from tree_kernels.tree_gated_delta_rule.triton_kernels.sizes import (
    PROVEN_SIZES,
    triton_or_chunked,
    triton_unavailable_reason,
)
from tree_kernels.tree_layout import TreeLayout

OP = "tree_gated_delta_rule"
IMPLEMENTATIONS = ("reference", "chunked", "triton")


def unavailable_reason(
    impl: str, *, device: torch.device, dtype: torch.dtype, key_size: int, value_size: int
) -> str | None:
    """Why `impl` cannot run on this device, dtype and state size, or None if it can.

    Raises:
        ValueError: there is no implementation of that name.
    """
    check_implementation(impl, IMPLEMENTATIONS)
    return triton_unavailable_reason(device, dtype, key_size, value_size) if impl == "triton" else None


def chosen_implementation(*, device: torch.device, dtype: torch.dtype, key_size: int, value_size: int) -> str:
    """The implementation that `impl="auto"` runs: triton on CUDA in half precision at tested sizes, else chunked."""
    return triton_or_chunked(device, dtype, key_size, value_size, proven=PROVEN_SIZES)


def tree_gated_delta_rule(
    q_NHK: torch.Tensor,
    k_NHK: torch.Tensor,
    v_NHV: torch.Tensor,
    g_NH: torch.Tensor,
    beta_NH: torch.Tensor,
    layout: TreeLayout | torch.Tensor,
    *,
    scale: float | None = None,
    initial_state: torch.Tensor | None = None,
    return_states_at: tuple[int, ...] | None = None,
    impl: str = "auto",
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Gated delta rule of a forest's unique tokens, each from its parent's state.

        S_t = exp(g_t) S_parent + k_t (beta_t (v_t - exp(g_t) S_parent^T k_t))^T,   out_t = scale * S_t^T q_t

    Args:
        q_NHK: [N, Hk, K], DFS order; the caller normalises if the model does.
        k_NHK: [N, Hk, K].
        v_NHV: [N, Hv, V]; Hv is a multiple of Hk, and key head h serves the Hv / Hk value heads from h * Hv / Hk on.
        g_NH: [N, Hv], natural logarithm of the decay, <= 0; any floating point dtype, usually float32.
        beta_NH: [N, Hv], strength of the write.
        layout: the forest, or its `subtree_end` [N]; a past is given by the initial state.
        scale: factor on the outputs; None: K ** -0.5.
        initial_state: [Hv, K, V] state before the roots, float32 (float64 for float64); None: zeros.
        return_states_at: tokens after which states are returned; on the host, because they decide launches.
        impl: "auto", "reference", "chunked" or "triton".

    Returns:
        output [N, Hv, V] in v's dtype, and the states [S, Hv, K, V] in float32 (float64 for float64) in the order of
        `return_states_at`, or None if it is None. Gradients flow to all tensors, and from the states.

    Raises:
        ValueError: shapes, dtypes or tokens do not fit.
        UnsupportedImplementation: `impl` cannot run on this device, dtype or size.
    """
    if isinstance(layout, torch.Tensor):
        layout = TreeLayout.from_subtree_end(layout)
    _check(q_NHK, k_NHK, v_NHV, g_NH, beta_NH, layout)
    state_shape = (v_NHV.shape[1], k_NHK.shape[2], v_NHV.shape[2])
    initial_state = initial_state_or_zeros(OP, initial_state, v_NHV, state_shape)
    wanted = check_tokens(OP, "return_states_at", return_states_at, len(v_NHV))
    problem = {"device": v_NHV.device, "dtype": v_NHV.dtype, "key_size": state_shape[1], "value_size": state_shape[2]}
    impl = implementation_to_run(OP, impl, chosen_implementation, unavailable_reason, **problem)
    scale = k_NHK.shape[-1] ** -0.5 if scale is None else float(scale)
    with torch.autocast(v_NHV.device.type, enabled=False):
        inputs = (q_NHK, k_NHK, v_NHV, g_NH, beta_NH)
        if layout.num_tokens == 0:
            out_NHV = v_NHV + 0 * initial_state.sum().to(v_NHV.dtype)
            states = initial_state.new_zeros(0, *initial_state.shape)
        elif impl == "reference":
            out_NHV, all_states = reference_delta_rule(*inputs, parents_of(layout), scale, initial_state)
            states = all_states[list(wanted)]
        elif impl == "triton":
            # Imported late, because Triton is optional and reads TRITON_INTERPRET when kernels are defined.
            from tree_kernels.tree_gated_delta_rule.triton_kernels.autograd import triton_delta_rule

            out_NHV, states = triton_delta_rule(*inputs, layout, scale, initial_state, wanted)
        else:
            out_NHV, states = chunked_delta_rule(*inputs, layout, scale, initial_state, wanted)
    return out_NHV, None if return_states_at is None else states


def _check(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, g: torch.Tensor, beta: torch.Tensor, layout: TreeLayout
) -> None:
    if q.dim() != 3 or q.shape != k.shape or v.dim() != 3:
        raise ValueError(
            f"{OP}: expected q, k [N, Hk, K] and v [N, Hv, V], received q {tuple(q.shape)}, k {tuple(k.shape)}, "
            f"v {tuple(v.shape)}"
        )
    if g.shape != v.shape[:2] or beta.shape != v.shape[:2]:
        raise ValueError(
            f"{OP}: expected g and beta {tuple(v.shape[:2])}, received g {tuple(g.shape)}, beta {tuple(beta.shape)}"
        )
    if k.shape[0] != v.shape[0] or layout.num_tokens != v.shape[0]:
        raise ValueError(
            f"{OP}: expected N tokens everywhere, received k {tuple(k.shape)}, v {tuple(v.shape)}, layout of "
            f"{layout.num_tokens} tokens"
        )
    check_heads(OP, v.shape[1], k.shape[1], ("Hv", "Hk"))
    if any(t.dtype != v.dtype for t in (q, k)) or not all(t.is_floating_point() for t in (v, g, beta)):
        received = ", ".join(str(t.dtype) for t in (q, k, v, g, beta))
        raise ValueError(f"{OP}: expected one floating point dtype of q, k, v, received {received} (q, k, v, g, beta)")
    check_one_device(OP, layout, q=q, k=k, v=v, g=g, beta=beta)
