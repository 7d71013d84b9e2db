"""Calls flash-attn-4's forward and backward for a plan or for leaf rows; imported only if that package is installed.

Legend: N tokens (padding included), M keys, H query heads, K key heads, D head size.
"""

from typing import Any

import cutlass
import torch
from flash_attn.cute.block_sparsity import BlockSparseTensorsTorch
from flash_attn.cute.interface import _flash_attn_bwd, _flash_attn_fwd
from torch._subclasses.fake_tensor import FakeTensor

from tree_kernels.tree_attention.fa4.fa4_plan import SHORTEST, Fa4Plan, HeadBlockLists
from tree_kernels.tree_attention.fa4.leaf_rows import LeafRows
from tree_kernels.tree_attention.fa4.masks import sees_ancestors, sees_near_ancestors
from tree_kernels.tree_attention.fa4.scheduler import heads_in_sections


def forward(
    q_NHD: torch.Tensor, k_MKD: torch.Tensor, v_MKD: torch.Tensor, plan: Fa4Plan | LeafRows, scale: float
) -> tuple[torch.Tensor, torch.Tensor]:
    """Output [N, H, D] and log-sum-exp (natural logarithm), float32 [H, N]."""
    if isinstance(plan, LeafRows):
        out_NHD, lse_HN = _flash_attn_fwd(
            q_NHD, k_MKD, v_MKD, softmax_scale=scale, return_lse=True, **_causal_rows(plan)
        )[:2]
        return out_NHD, lse_HN
    inputs = (t.unsqueeze(0) for t in (q_NHD, k_MKD, v_MKD))
    sparse = _sparse_tensors(plan.forward)
    out_1NHD, lse_1HN = _flash_attn_fwd(
        *inputs, softmax_scale=scale, block_sparse_tensors=sparse, return_lse=True, **_mask(plan)
    )[:2]
    return out_1NHD.squeeze(0), lse_1HN.squeeze(0)


def backward(
    q_NHD: torch.Tensor,
    k_MKD: torch.Tensor,
    v_MKD: torch.Tensor,
    out_NHD: torch.Tensor,
    lse_HN: torch.Tensor,
    grad_out_NHD: torch.Tensor,
    plan: Fa4Plan | LeafRows,
    scale: float,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Gradients of q, k and v in their dtype."""
    if isinstance(plan, LeafRows):
        grad_q, grad_k, grad_v = _flash_attn_bwd(
            q_NHD, k_MKD, v_MKD, out_NHD, grad_out_NHD, lse_HN, softmax_scale=scale, **_causal_rows(plan)
        )
        return grad_q, grad_k, grad_v
    inputs = (t.unsqueeze(0) for t in (q_NHD, k_MKD, v_MKD, out_NHD, grad_out_NHD, lse_HN))
    sparse = _sparse_tensors(plan.backward)
    with heads_in_sections():
        grad_q, grad_k, grad_v = _flash_attn_bwd(
            *inputs, softmax_scale=scale, block_sparse_tensors=sparse, **_mask(plan)
        )
    return grad_q.squeeze(0), grad_k.squeeze(0), grad_v.squeeze(0)


def _causal_rows(rows: LeafRows) -> dict[str, Any]:
    """Arguments for concatenated causal rows; in each row the last query sees the last key."""
    # FA4 compiles other kernels for rows within a single block, and the longest length may be any upper bound.
    return {
        "causal": True,
        "cu_seqlens_q": rows.query_offsets,
        "cu_seqlens_k": rows.key_offsets,
        "max_seqlen_q": max(rows.longest_query, SHORTEST),
        "max_seqlen_k": max(rows.longest_key, SHORTEST),
    }


def _sparse_tensors(lists: HeadBlockLists) -> BlockSparseTensorsTorch:
    return BlockSparseTensorsTorch(
        mask_block_cnt=lists.partial_count,
        mask_block_idx=lists.partial_index,
        full_block_cnt=lists.full_count,
        full_block_idx=lists.full_index,
        block_size=lists.block_size,
    )


def _mask(plan: Fa4Plan) -> dict[str, Any]:
    """The mask function and the addresses that it reads; the plan keeps the vectors alive during the launch."""
    if plan.key_depths is None or plan.query_depths is None:
        return {"mask_mod": sees_ancestors, "aux_scalars": (_address(plan.ends),)}
    vectors = (plan.ends, plan.key_depths, plan.query_depths)
    scalars = (*(_address(t) for t in vectors), cutlass.Int32(plan.window))
    return {"mask_mod": sees_near_ancestors, "aux_scalars": scalars}


def _address(t: torch.Tensor) -> cutlass.Int64:
    return cutlass.Int64(0 if isinstance(t, FakeTensor) else t.data_ptr())
