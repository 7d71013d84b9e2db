"""tree_state_space: the recurrence of Mamba 2 in which every token starts from the state of its parent.

The gated delta rule without its correction, on the same tiles. See kernels/README.md.
Legend: N unique tokens, G groups of heads that share B and C, H heads, K state size, P head size, S requested states.
"""

import torch

from tree_kernels.argument_checks import check_heads, check_one_device, check_tokens, initial_state_or_zeros
from tree_kernels.implementation import check_implementation, implementation_to_run
from tree_kernels.parents import parents_of
from tree_kernels.tree_gated_delta_rule.triton_kernels.sizes import triton_or_chunked, triton_unavailable_reason
from tree_kernels.tree_layout import TreeLayout
from tree_kernels.tree_state_space.portable.chunked import chunked_state_space
from tree_kernels.tree_state_space.reference import reference_state_space

OP = "tree_state_space"
IMPLEMENTATIONS = ("reference", "chunked", "triton")
PROVEN_SIZES = frozenset({(128, 64), (64, 64), (128, 128)})
"""Sizes (state, head) at which compiled kernels passed kernels/tests/test_recurrences_on_cuda.py on an H200."""


def unavailable_reason(
    impl: str, *, device: torch.device, dtype: torch.dtype, state_size: int, head_size: int
) -> str | None:
    """Why `impl` cannot run on this device, dtype and size, or None if it can.

    Raises:
        ValueError: there is no implementation of that name.
    """
    check_implementation(impl, IMPLEMENTATIONS)
    return triton_unavailable_reason(device, dtype, state_size, head_size) if impl == "triton" else None


def chosen_implementation(*, device: torch.device, dtype: torch.dtype, state_size: int, head_size: int) -> str:
    """The implementation that `impl="auto"` runs: triton on CUDA in half precision at tested sizes, else chunked."""
    return triton_or_chunked(device, dtype, state_size, head_size, proven=PROVEN_SIZES)


def tree_state_space(
    x_NHP: torch.Tensor,
    b_NGK: torch.Tensor,
    c_NGK: torch.Tensor,
    g_NH: torch.Tensor,
    dt_NH: torch.Tensor,
    layout: TreeLayout | torch.Tensor,
    *,
    initial_state: torch.Tensor | None = None,
    return_states_at: tuple[int, ...] | None = None,
    impl: str = "auto",
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """State space recurrence of a forest's unique tokens, each from its parent's state.

        S_t = exp(g_t) S_parent + dt_t b_t x_t^T,   out_t = S_t^T c_t

    Args:
        x_NHP: [N, H, P], DFS order.
        b_NGK: [N, G, K]; H is a multiple of G, and group g serves the H / G heads from g * H / G on.
        c_NGK: [N, G, K].
        g_NH: [N, H], natural logarithm of the decay (Mamba's dt * A), <= 0; any floating point dtype, usually float32.
        dt_NH: [N, H], step size that scales the written values; any floating point dtype, usually float32.
        layout: the forest, or its `subtree_end` [N]; a past is given by the initial state.
        initial_state: [H, K, P] state before the roots, float32 (float64 for float64); None: zeros.
        return_states_at: tokens after which states are returned, on the host.
        impl: "auto", "reference", "chunked" or "triton".

    Returns:
        output [N, H, P] in x's dtype, and the states [S, H, K, P] in float32 (float64 for float64) in the order of
        `return_states_at`, or None if it is None. Gradients flow to all tensors, and from the states.

    Raises:
        ValueError: shapes, dtypes or tokens do not fit.
        UnsupportedImplementation: `impl` cannot run on this device, dtype or size.
    """
    if isinstance(layout, torch.Tensor):
        layout = TreeLayout.from_subtree_end(layout)
    _check(x_NHP, b_NGK, c_NGK, g_NH, dt_NH, layout)
    state_shape = (x_NHP.shape[1], b_NGK.shape[2], x_NHP.shape[2])
    initial_state = initial_state_or_zeros(OP, initial_state, x_NHP, state_shape)
    wanted = check_tokens(OP, "return_states_at", return_states_at, len(x_NHP))
    problem = {"device": x_NHP.device, "dtype": x_NHP.dtype, "state_size": state_shape[1], "head_size": state_shape[2]}
    impl = implementation_to_run(OP, impl, chosen_implementation, unavailable_reason, **problem)
    inputs = (x_NHP, b_NGK, c_NGK, g_NH, dt_NH)
    with torch.autocast(x_NHP.device.type, enabled=False):
        if layout.num_tokens == 0:
            out_NHP = x_NHP + 0 * initial_state.sum().to(x_NHP.dtype)
            states = initial_state.new_zeros(0, *state_shape)
        elif impl == "reference":
            out_NHP, all_states = reference_state_space(*inputs, parents_of(layout), initial_state)
            states = all_states[list(wanted)]
        elif impl == "triton":
            # Imported late, because Triton is optional and reads TRITON_INTERPRET when kernels are defined.
            from tree_kernels.tree_state_space.triton_kernels.autograd import triton_state_space

            out_NHP, states = triton_state_space(*inputs, layout, initial_state, wanted)
        else:
            out_NHP, states = chunked_state_space(*inputs, layout, initial_state, wanted)
    return out_NHP, None if return_states_at is None else states


def _check(
    x: torch.Tensor, b: torch.Tensor, c: torch.Tensor, g: torch.Tensor, dt: torch.Tensor, layout: TreeLayout
) -> None:
    fits = x.dim() == 3 and b.dim() == 3 and b.shape == c.shape and len(b) == len(x) == layout.num_tokens
    if not fits or g.shape != x.shape[:2] or dt.shape != x.shape[:2]:
        received = ", ".join(
            f"{n} {tuple(t.shape)}" for n, t in zip(("x", "b", "c", "g", "dt"), (x, b, c, g, dt), strict=True)
        )
        raise ValueError(
            f"{OP}: expected x [N, H, P], b and c [N, G, K], g and dt [N, H], received {received} and a layout of "
            f"{layout.num_tokens} tokens"
        )
    check_heads(OP, x.shape[1], b.shape[1], ("H", "G"))
    if b.dtype != x.dtype or c.dtype != x.dtype or not all(t.is_floating_point() for t in (x, g, dt)):
        received = ", ".join(str(t.dtype) for t in (x, b, c, g, dt))
        raise ValueError(f"{OP}: expected one floating point dtype of x, b, c, received {received} (x, b, c, g, dt)")
    check_one_device(OP, layout, x=x, b=b, c=c, g=g, dt=dt)
