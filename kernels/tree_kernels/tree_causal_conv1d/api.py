"""tree_causal_conv1d: the short depthwise convolution in which a token sees the last K inputs on its path.

See kernels/README.md. Legend: N unique tokens, C channels, K taps, S requested contexts.
"""

import numpy as np
import torch
from torch.nn import functional

from tree_kernels.argument_checks import check_one_device, check_tokens
from tree_kernels.host_copy import to_device
from tree_kernels.implementation import check_implementation, implementation_to_run
from tree_kernels.parents import parents_of
from tree_kernels.tree_causal_conv1d.portable.shifted import shifted_conv1d
from tree_kernels.tree_causal_conv1d.reference import reference_conv1d
from tree_kernels.tree_causal_conv1d.triton_kernels.sizes import PROVEN_TAPS
from tree_kernels.tree_causal_conv1d.windows import host_windows_of, jumps_of
from tree_kernels.tree_layout import TreeLayout
from tree_kernels.triton_support import triton_unavailable_reason

OP = "tree_causal_conv1d"
IMPLEMENTATIONS = ("reference", "shifted", "triton")
ACTIVATIONS = (None, "silu", "swish")


def unavailable_reason(impl: str, *, device: torch.device, dtype: torch.dtype, taps: int) -> str | None:
    """Why `impl` cannot run on this device and dtype, or None if it can; the number of taps does not matter.

    Raises:
        ValueError: there is no implementation of that name.
    """
    check_implementation(impl, IMPLEMENTATIONS)
    return triton_unavailable_reason(device, dtype, multiplies=False) if impl == "triton" else None


def chosen_implementation(*, device: torch.device, dtype: torch.dtype, taps: int) -> str:
    """The implementation that `impl="auto"` runs: triton on CUDA with the tested number of taps, else shifted."""
    is_proven = device.type == "cuda" and taps == PROVEN_TAPS
    return "triton" if is_proven and triton_unavailable_reason(device, dtype, multiplies=False) is None else "shifted"


def tree_causal_conv1d(
    x_NC: torch.Tensor,
    weight_CK: torch.Tensor,
    bias_C: torch.Tensor | None,
    layout: TreeLayout | torch.Tensor,
    *,
    activation: str | None = None,
    initial_context: torch.Tensor | None = None,
    return_contexts_at: tuple[int, ...] | None = None,
    impl: str = "auto",
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Causal depthwise convolution of a forest's unique tokens, each over its ancestors.

    Args:
        x_NC: [N, C], DFS order.
        weight_CK: [C, K]; the last tap applies to the token itself, the previous one to its parent, and so on.
        bias_C: [C] or None.
        layout: the forest, or its `subtree_end` [N]; a past is given by the context.
        activation: None, "silu" or "swish" (the same), applied to the sum.
        initial_context: [K - 1, C] inputs before the roots, oldest first; None: zeros.
        return_contexts_at: tokens after which the last K - 1 inputs are returned, for use as `initial_context`.
        impl: "auto" (see `chosen_implementation`), "reference", "shifted" or "triton".

    Returns:
        output [N, C] in x's dtype, summed in float32 (float64 for float64), and the contexts [S, K - 1, C] in the
        order of `return_contexts_at`, or None if it is None. Gradients flow to all tensors, and from the contexts.

    Raises:
        ValueError: shapes, dtypes, tokens or the activation do not fit.
        UnsupportedImplementation: `impl` cannot run on this device or dtype.
    """
    if isinstance(layout, torch.Tensor):
        layout = TreeLayout.from_subtree_end(layout)
    _check(x_NC, weight_CK, bias_C, layout, initial_context)
    if activation not in ACTIVATIONS:
        raise ValueError(f"{OP}: expected activation in {ACTIVATIONS}, received {activation!r}")
    wanted = check_tokens(OP, "return_contexts_at", return_contexts_at, len(x_NC))
    taps = weight_CK.shape[1]
    problem = {"device": x_NC.device, "dtype": x_NC.dtype, "taps": taps}
    impl = implementation_to_run(OP, impl, chosen_implementation, unavailable_reason, **problem)
    context_KC = x_NC.new_zeros(taps - 1, x_NC.shape[1]) if initial_context is None else initial_context
    with torch.autocast(x_NC.device.type, enabled=False):
        if len(x_NC) and impl == "triton":
            # Imported late, because Triton is optional and reads TRITON_INTERPRET when kernels are defined.
            from tree_kernels.tree_causal_conv1d.triton_kernels.autograd import triton_conv1d

            out_NC = triton_conv1d(x_NC, weight_CK, bias_C, layout, context_KC, activation is not None)
        else:
            if len(x_NC) and impl == "reference":
                out_NC, _ = reference_conv1d(x_NC, weight_CK, bias_C, parents_of(layout), context_KC)
            else:
                out_NC = shifted_conv1d(x_NC, weight_CK, bias_C, jumps_of(layout, taps), context_KC)
            out_NC = functional.silu(out_NC) if activation else out_NC
    contexts_SKC = None
    if return_contexts_at is not None:
        input_NK = host_windows_of(layout, taps).input_NK
        # All inputs of the window except the oldest; none with one tap.
        index_SK = to_device(input_NK[list(wanted), 1:].astype(np.int64), x_NC.device)
        contexts_SKC = torch.cat([context_KC, x_NC])[index_SK]
    return out_NC.to(x_NC.dtype), contexts_SKC


def _check(
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    layout: TreeLayout,
    initial_context: torch.Tensor | None,
) -> None:
    if not x.is_floating_point():
        raise ValueError(f"{OP}: expected a floating point dtype, received {x.dtype}")
    if x.dim() != 2 or weight.dim() != 2 or weight.shape[0] != x.shape[1] or weight.shape[1] < 1:
        raise ValueError(
            f"{OP}: expected x [N, C] and weight [C, K], received x {tuple(x.shape)}, weight {tuple(weight.shape)}"
        )
    if layout.num_tokens != x.shape[0]:
        raise ValueError(f"{OP}: expected {x.shape[0]} tokens, received a layout of {layout.num_tokens}")
    if bias is not None and bias.shape != (x.shape[1],):
        raise ValueError(f"{OP}: expected bias [C] = [{x.shape[1]}], received {tuple(bias.shape)}")
    expected = (weight.shape[1] - 1, x.shape[1])
    if initial_context is not None and (initial_context.shape != expected or initial_context.dtype != x.dtype):
        raise ValueError(
            f"{OP}: expected initial_context {expected} in {x.dtype}, received {tuple(initial_context.shape)} in "
            f"{initial_context.dtype}"
        )
    check_one_device(OP, layout, x=x, weight=weight)
