"""The convolution with Triton kernels. Legend: N unique tokens, C channels, K taps, M = K - 1 + N inputs."""

from typing import Any

import torch

from tree_kernels.tree_causal_conv1d.triton_kernels.convolution_kernels import (
    forward_kernel,
    input_gradients_kernel,
    sum_gradients_kernel,
)
from tree_kernels.tree_causal_conv1d.triton_kernels.sizes import CHANNELS, TOKENS, WARPS
from tree_kernels.tree_causal_conv1d.triton_kernels.window_lists import WindowLists, window_lists
from tree_kernels.tree_layout import TreeLayout


def triton_conv1d(
    x_NC: torch.Tensor,
    weight_CK: torch.Tensor,
    bias_C: torch.Tensor | None,
    layout: TreeLayout,
    context_KC: torch.Tensor,
    is_silu: bool,
) -> torch.Tensor:
    """Convolution [N, C] in x's dtype, activation included; arguments as in `reference_conv1d`."""
    lists = window_lists(layout, weight_CK.shape[1])
    out_NC: torch.Tensor = _TritonConv1d.apply(x_NC, weight_CK, bias_C, context_KC, lists, is_silu)
    return out_NC


class _TritonConv1d(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        x_NC: torch.Tensor,
        weight_CK: torch.Tensor,
        bias_C: torch.Tensor | None,
        context_KC: torch.Tensor,
        lists: WindowLists,
        is_silu: bool,
    ) -> torch.Tensor:
        x_NC, weight_CK, context_KC = x_NC.contiguous(), weight_CK.contiguous(), context_KC.contiguous()
        bias_C = None if bias_C is None else bias_C.contiguous()
        out_NC = torch.empty_like(x_NC)
        forward_kernel[_grid(x_NC)](
            x_NC, context_KC, weight_CK, bias_C, lists.input, out_NC, *x_NC.shape,
            BIAS=bias_C is not None, SILU=is_silu, **_constants(weight_CK),
        )  # fmt: skip
        ctx.save_for_backward(x_NC, weight_CK, bias_C, context_KC)
        ctx.lists, ctx.is_silu = lists, is_silu
        return out_NC

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, d_out_NC: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        x_NC, weight_CK, bias_C, context_KC = ctx.saved_tensors
        (channels, taps), lists = weight_CK.shape, ctx.lists
        d_out_NC = d_out_NC.contiguous()
        d_sum_NC = torch.empty_like(x_NC)
        grid = _grid(x_NC)
        parts = x_NC.new_empty(grid[1], taps + 1, channels, dtype=torch.float32)
        sum_gradients_kernel[grid](
            x_NC, context_KC, weight_CK, bias_C, lists.input, d_out_NC, d_sum_NC, parts, *x_NC.shape,
            BIAS=bias_C is not None, SILU=ctx.is_silu, **_constants(weight_CK),
        )  # fmt: skip
        d_input_MC = x_NC.new_empty(taps - 1 + len(x_NC), channels)
        input_gradients_kernel[_grid(d_input_MC)](
            weight_CK, d_sum_NC, lists.reader_start, lists.reader, d_input_MC, *d_input_MC.shape,
            **_constants(weight_CK),
        )  # fmt: skip
        sums = parts.sum(0)
        d_weight_CK = sums[:taps].T.to(weight_CK.dtype)
        d_bias_C = None if bias_C is None else sums[taps].to(bias_C.dtype)
        return d_input_MC[taps - 1 :], d_weight_CK, d_bias_C, d_input_MC[: taps - 1], None, None


def _grid(rows_RC: torch.Tensor) -> tuple[int, int]:
    rows, channels = rows_RC.shape
    return -(-channels // CHANNELS), -(-rows // TOKENS)


def _constants(weight_CK: torch.Tensor) -> dict[str, int]:
    return {"TAPS": weight_CK.shape[1], "TOKENS": TOKENS, "CHANNELS": CHANNELS, "num_warps": WARPS}
