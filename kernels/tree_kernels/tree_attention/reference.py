"""The definition of tree attention: a masked softmax over an explicit [N, P + N] mask.

Legend: N unique tokens, P past tokens, M = P + N keys, H query heads, G query heads per key head, D head size of
queries and keys, E of values.
"""

import torch

from tree_kernels.accumulation import accumulation_dtype
from tree_kernels.tree_attention.score_rule import ScoreRule
from tree_kernels.tree_layout import TreeLayout


def visible_mask(layout: TreeLayout, *, window: int | None = None) -> torch.Tensor:
    """bool [N, P + N], past keys first: which keys each token sees; `window` as in `tree_attention`."""
    index = torch.arange(layout.num_tokens, device=layout.device)
    earlier = index[None, :] <= index[:, None]
    inside = index[:, None] < layout.subtree_end[None, :]
    past = torch.ones(layout.num_tokens, layout.past_length, dtype=torch.bool, device=layout.device)
    visible = torch.cat([past, earlier & inside], dim=1)
    if window is not None:
        past_depth = torch.arange(layout.past_length, dtype=torch.int32, device=layout.device)
        key_depth = torch.cat([past_depth, layout.depth])
        visible &= layout.depth[:, None] - key_depth[None, :] < window
    return visible


def reference_attention(
    q_NHD: torch.Tensor,
    k_MHD: torch.Tensor,
    v_MHD: torch.Tensor,
    sinks_H: torch.Tensor | None,
    layout: TreeLayout,
    rule: ScoreRule,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Masked softmax attention with O(N (P + N)) memory.

    Args:
        q_NHD: [N, Hq, D].
        k_MHD: [P + N, Hkv, D], past first.
        v_MHD: [P + N, Hkv, E].
        sinks_H: [Hq] logits that join the denominator, or None.
        layout: the forest.
        rule: scale, window, soft cap.

    Returns:
        output [N, Hq, E] in q's dtype and log-sum-exp [N, Hq] (sinks included) in the accumulation dtype.
    """
    dtype = accumulation_dtype(q_NHD.dtype)
    group = q_NHD.shape[1] // k_MHD.shape[1]
    k_HMD = k_MHD.to(dtype).repeat_interleave(group, dim=1).transpose(0, 1)
    v_HMD = v_MHD.to(dtype).repeat_interleave(group, dim=1).transpose(0, 1)
    scores_HNM = rule.scores(q_NHD.to(dtype).transpose(0, 1) @ k_HMD.transpose(1, 2))
    scores_HNM = scores_HNM.masked_fill(~visible_mask(layout, window=rule.window), float("-inf"))
    lse_HN = torch.logsumexp(scores_HNM, dim=-1)
    if sinks_H is not None:
        lse_HN = torch.logaddexp(lse_HN, sinks_H.to(dtype)[:, None])
    out_HND = torch.exp(scores_HNM - lse_HN[..., None]) @ v_HMD
    return out_HND.transpose(0, 1).to(q_NHD.dtype), lse_HN.transpose(0, 1)
