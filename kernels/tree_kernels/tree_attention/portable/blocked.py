"""Tree attention in query blocks, for any device and dtype, without an [N, N] tensor; the backward recomputes blocks.

A block of consecutive DFS tokens reads the past, the ancestors of its first token and itself, so the cost is that of
the visible pairs plus half a block per token. Legend: N unique tokens, P past tokens, B tokens of a block, M keys of a
block, H query heads, K key heads, R = H / K * B rows of a key head, D head size (values may have
another).
"""

from typing import Any

import torch
from torch.nn.functional import scaled_dot_product_attention

from tree_kernels.accumulation import accumulation_dtype
from tree_kernels.tree_attention.portable.query_blocks import QueryBlock, query_blocks
from tree_kernels.tree_attention.score_rule import ScoreRule
from tree_kernels.tree_layout import TreeLayout

BLOCK_TOKENS = {"cpu": 128}
DEFAULT_BLOCK_TOKENS = 512


def blocked_attention(
    q_NHD: torch.Tensor,
    k_MKD: torch.Tensor,
    v_MKD: torch.Tensor,
    sinks_H: torch.Tensor | None,
    layout: TreeLayout,
    rule: ScoreRule,
    *,
    return_lse: bool = False,
    block_tokens: int | None = None,
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Output [N, Hq, D] in q's dtype, and log-sum-exp [N, Hq] (sinks included) in the accumulation dtype.

    Block by block; without cap, sinks and `return_lse` by torch's fused attention, which has no log-sum-exp (None).
    Arguments as in `reference_attention`; `block_tokens` are the queries per block, None chooses by device.
    """
    size = block_tokens or BLOCK_TOKENS.get(q_NHD.device.type, DEFAULT_BLOCK_TOKENS)
    blocks = query_blocks(layout, size, rule.window)
    if return_lse or rule.softcap is not None or sinks_H is not None:
        return _ExplicitBlocks.apply(q_NHD, k_MKD, v_MKD, sinks_H, blocks, rule)
    return _FusedBlocks.apply(q_NHD, k_MKD, v_MKD, blocks, rule), None


def _fused_block(
    q_BHD: torch.Tensor, k_MKD: torch.Tensor, v_MKD: torch.Tensor, block: QueryBlock, rule: ScoreRule
) -> torch.Tensor:
    """Output [B, Hq, D] of one block with torch's scaled dot product attention."""
    out_1HBD = scaled_dot_product_attention(
        q_BHD.transpose(0, 1)[None],
        k_MKD.transpose(0, 1)[None],
        v_MKD.transpose(0, 1)[None],
        attn_mask=block.bias(q_BHD.dtype),
        scale=rule.scale,
        enable_gqa=q_BHD.shape[1] != k_MKD.shape[1],
    )
    return out_1HBD[0].transpose(0, 1)


class _FusedBlocks(torch.autograd.Function):
    """Plain softmax attention; the backward recomputes each block, so only q, k, v are saved."""

    @staticmethod
    def forward(
        ctx: Any,
        q_NHD: torch.Tensor,
        k_MKD: torch.Tensor,
        v_MKD: torch.Tensor,
        blocks: tuple[QueryBlock, ...],
        rule: ScoreRule,
    ) -> torch.Tensor:
        out_NHD = q_NHD.new_empty(*q_NHD.shape[:2], v_MKD.shape[-1])
        for block in blocks:
            out_NHD[block.start : block.stop] = _fused_block(
                q_NHD[block.start : block.stop], block.gather(k_MKD), block.gather(v_MKD), block, rule
            )
        ctx.save_for_backward(q_NHD, k_MKD, v_MKD)
        ctx.blocks, ctx.rule = blocks, rule
        return out_NHD

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, grad_NHD: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        q_NHD, k_MKD, v_MKD = ctx.saved_tensors
        dtype = accumulation_dtype(q_NHD.dtype)
        dq_NHD = torch.empty_like(q_NHD, memory_format=torch.contiguous_format)
        dk_MKD = torch.zeros(k_MKD.shape, dtype=dtype, device=k_MKD.device)
        dv_MKD = torch.zeros(v_MKD.shape, dtype=dtype, device=v_MKD.device)
        for block in ctx.blocks:
            rows = slice(block.start, block.stop)
            leaves = tuple(t.detach().requires_grad_() for t in (q_NHD[rows], block.gather(k_MKD), block.gather(v_MKD)))
            with torch.enable_grad(), torch.autocast(q_NHD.device.type, enabled=False):
                out = _fused_block(leaves[0], leaves[1], leaves[2], block, ctx.rule)
            dq, dk, dv = torch.autograd.grad(out, leaves, grad_NHD[rows])
            dq_NHD[rows] = dq
            block.scatter_add(dk_MKD, dk.to(dtype))
            block.scatter_add(dv_MKD, dv.to(dtype))
        return dq_NHD, dk_MKD.to(k_MKD.dtype), dv_MKD.to(v_MKD.dtype), None, None


def _by_key_head(t_BHD: torch.Tensor, key_heads: int, dtype: torch.dtype) -> torch.Tensor:
    """[B, Hq, D] as [Hkv, R, D], so that the query heads of a key head share one matrix product."""
    return t_BHD.to(dtype).transpose(0, 1).reshape(key_heads, -1, t_BHD.shape[-1])


def _by_token(t_KRD: torch.Tensor, size_B: int) -> torch.Tensor:
    """Inverse of `_by_key_head`."""
    return t_KRD.reshape(-1, size_B, t_KRD.shape[-1]).transpose(0, 1)


def _block_scores(
    q_KRD: torch.Tensor, k_KMD: torch.Tensor, block: QueryBlock, rule: ScoreRule
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Scores [Hq, B, M], -inf if invisible, and tanh(score / softcap) if there is a cap."""
    size_B, size_M = block.stop - block.start, k_KMD.shape[1]
    scores = torch.matmul(q_KRD, k_KMD.transpose(1, 2)).view(-1, size_B, size_M).mul_(rule.scale)
    tanh = None
    if rule.softcap is not None:
        tanh = scores.div_(rule.softcap).tanh_()
        scores = tanh * rule.softcap
    scores[..., block.masked_from :].masked_fill_(~block.visible(), float("-inf"))
    return scores, tanh


class _ExplicitBlocks(torch.autograd.Function):
    """Explicit softmax, for soft cap, sinks and a differentiable log-sum-exp."""

    @staticmethod
    def forward(
        ctx: Any,
        q_NHD: torch.Tensor,
        k_MKD: torch.Tensor,
        v_MKD: torch.Tensor,
        sinks_H: torch.Tensor | None,
        blocks: tuple[QueryBlock, ...],
        rule: ScoreRule,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        dtype, key_heads = accumulation_dtype(q_NHD.dtype), k_MKD.shape[1]
        out_NHD = torch.empty(*q_NHD.shape[:2], v_MKD.shape[-1], dtype=dtype, device=q_NHD.device)
        lse_NH = torch.empty(q_NHD.shape[:2], dtype=dtype, device=q_NHD.device)
        for block in blocks:
            rows = slice(block.start, block.stop)
            k_KMD = block.gather(k_MKD).to(dtype).transpose(0, 1)
            v_KMD = block.gather(v_MKD).to(dtype).transpose(0, 1)
            scores, _ = _block_scores(_by_key_head(q_NHD[rows], key_heads, dtype), k_KMD, block, rule)
            lse_HB = torch.logsumexp(scores, dim=-1)
            if sinks_H is not None:
                lse_HB = torch.logaddexp(lse_HB, sinks_H.to(dtype)[:, None])
            weights_KRM = scores.sub_(lse_HB[..., None]).exp_().view(key_heads, -1, k_KMD.shape[1])
            out_NHD[rows] = _by_token(weights_KRM @ v_KMD, block.stop - block.start)
            lse_NH[rows] = lse_HB.T
        ctx.save_for_backward(q_NHD, k_MKD, v_MKD, sinks_H, out_NHD, lse_NH)
        ctx.blocks, ctx.rule = blocks, rule
        return out_NHD.to(q_NHD.dtype), lse_NH

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, grad_NHD: torch.Tensor, grad_lse_NH: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        q_NHD, k_MKD, v_MKD, sinks_H, out_NHD, lse_NH = ctx.saved_tensors
        rule, dtype, key_heads = ctx.rule, out_NHD.dtype, k_MKD.shape[1]
        grad_NHD = grad_NHD.to(dtype)
        # d score = weight * (d weight - offset), where the offset of a row includes the gradient of its log-sum-exp.
        offset_NH = (grad_NHD * out_NHD).sum(-1) - grad_lse_NH.to(dtype)
        dq_NHD = torch.empty_like(q_NHD, memory_format=torch.contiguous_format)
        dk_MKD = torch.zeros(k_MKD.shape, dtype=dtype, device=k_MKD.device)
        dv_MKD = torch.zeros(v_MKD.shape, dtype=dtype, device=v_MKD.device)
        for block in ctx.blocks:
            rows, size_B = slice(block.start, block.stop), block.stop - block.start
            q_KRD = _by_key_head(q_NHD[rows], key_heads, dtype)
            grad_KRD = _by_key_head(grad_NHD[rows], key_heads, dtype)
            k_KMD = block.gather(k_MKD).to(dtype).transpose(0, 1)
            v_KMD = block.gather(v_MKD).to(dtype).transpose(0, 1)
            scores, tanh = _block_scores(q_KRD, k_KMD, block, rule)
            weights_HBM = scores.sub_(lse_NH[rows].T[..., None]).exp_()
            weights_KRM = weights_HBM.view(key_heads, -1, k_KMD.shape[1])
            block.scatter_add(dv_MKD, (weights_KRM.transpose(1, 2) @ grad_KRD).transpose(0, 1))
            dscores_HBM = (grad_KRD @ v_KMD.transpose(1, 2)).view_as(weights_HBM)
            dscores_HBM.sub_(offset_NH[rows].T[..., None]).mul_(weights_HBM).mul_(rule.scale)
            if tanh is not None:
                dscores_HBM.mul_(1 - tanh * tanh)
            dscores_KRM = dscores_HBM.view_as(weights_KRM)
            dq_NHD[rows] = _by_token(dscores_KRM @ k_KMD, size_B).to(q_NHD.dtype)
            block.scatter_add(dk_MKD, (dscores_KRM.transpose(1, 2) @ q_KRD).transpose(0, 1))
        dsinks_H = None
        if sinks_H is not None:
            sink_weight_NH = torch.exp(sinks_H.to(dtype) - lse_NH)
            dsinks_H = -(sink_weight_NH * offset_NH).sum(0).to(sinks_H.dtype)
        return dq_NHD, dk_MKD.to(k_MKD.dtype), dv_MKD.to(v_MKD.dtype), dsinks_H, None, None
