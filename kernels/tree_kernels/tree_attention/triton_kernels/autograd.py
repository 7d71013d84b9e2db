"""Tree attention with our Triton kernels: any length without recompilation, deterministic forward and backward.

Legend: N unique tokens, P past tokens, M = P + N keys, H query heads, K key heads, D head size (values may have
another).
"""

from dataclasses import replace
from typing import Any

import torch

from tree_kernels.tree_attention.score_rule import ScoreRule
from tree_kernels.tree_attention.triton_kernels.launch import (
    BackwardInputs,
    forward,
    key_gradients,
    query_gradient,
    readable,
    row_term,
)
from tree_kernels.tree_attention.triton_kernels.sizes import Tiles, tiles_for
from tree_kernels.tree_layout import TreeLayout


def triton_attention(
    q_NHD: torch.Tensor,
    k_MKD: torch.Tensor,
    v_MKD: torch.Tensor,
    sinks_H: torch.Tensor | None,
    layout: TreeLayout,
    rule: ScoreRule,
    *,
    tiles: Tiles | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Output [N, Hq, E] in q's dtype and log-sum-exp float32 [N, Hq], sinks included.

    Arguments as in `reference_attention`; `tiles` None chooses by head size, dtype and architecture.
    """
    if rule.scale <= 0:
        # The forward kernel takes the maximum before it scales, which is right for positive scales only.
        q_NHD = -q_NHD if rule.scale < 0 else q_NHD * 0
        rule = replace(rule, scale=-rule.scale if rule.scale < 0 else 1.0)
    if q_NHD.shape[0] == 0:
        nothing = q_NHD.sum(-1, keepdim=True) + (k_MKD.sum() + v_MKD.sum()) * 0
        return nothing.expand(-1, -1, v_MKD.shape[-1]), nothing.sum(-1).float()
    tiles = tiles or tiles_for(max(q_NHD.shape[-1], v_MKD.shape[-1]), q_NHD.dtype, q_NHD.device)
    return _TritonAttention.apply(q_NHD, k_MKD, v_MKD, sinks_H, layout, rule, tiles)


class _TritonAttention(torch.autograd.Function):
    """Saves q, k, v, the output and its log-sum-exp; the backward recomputes the weights."""

    @staticmethod
    def forward(
        ctx: Any,
        q_NHD: torch.Tensor,
        k_MKD: torch.Tensor,
        v_MKD: torch.Tensor,
        sinks_H: torch.Tensor | None,
        layout: TreeLayout,
        rule: ScoreRule,
        tiles: Tiles,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        # The gradient of an unused log-sum-exp is then None instead of zeros.
        ctx.set_materialize_grads(False)
        q_NHD, k_MKD, v_MKD = readable(q_NHD), readable(k_MKD), readable(v_MKD)
        sinks_H = None if sinks_H is None else sinks_H.contiguous()
        out_NHD, lse_HN = forward(q_NHD, k_MKD, v_MKD, sinks_H, layout, rule, tiles.forward)
        ctx.save_for_backward(q_NHD, k_MKD, v_MKD, sinks_H, out_NHD, lse_HN)
        ctx.layout, ctx.rule, ctx.tiles = layout, rule, tiles
        return out_NHD, lse_HN[:, : q_NHD.shape[0]].T

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(
        ctx: Any, grad_NHD: torch.Tensor | None, grad_lse_NH: torch.Tensor | None
    ) -> tuple[torch.Tensor | None, ...]:
        q_NHD, k_MKD, v_MKD, sinks_H, out_NHD, lse_HN = ctx.saved_tensors
        grad_NHD = torch.zeros_like(out_NHD) if grad_NHD is None else readable(grad_NHD)
        row_term_HN = row_term(out_NHD, grad_NHD, grad_lse_NH)
        given = BackwardInputs(
            q_NHD=q_NHD, k_MKD=k_MKD, v_MKD=v_MKD, grad_NHD=grad_NHD, lse_HN=lse_HN, row_term_HN=row_term_HN,
            layout=ctx.layout, rule=ctx.rule,
        )  # fmt: skip
        grad_q_NHD = query_gradient(given, ctx.tiles.query_gradient)
        grad_k_MKD, grad_v_MKD = key_gradients(given, ctx.tiles.key_gradients)
        grad_sinks_H = None
        if sinks_H is not None:
            sink_weight_HN = torch.exp(sinks_H.float()[:, None] - lse_HN)[:, : q_NHD.shape[0]]
            grad_sinks_H = -(sink_weight_HN * row_term_HN[:, : q_NHD.shape[0]]).sum(1).to(sinks_H.dtype)
        return grad_q_NHD, grad_k_MKD, grad_v_MKD, grad_sinks_H, None, None, None
