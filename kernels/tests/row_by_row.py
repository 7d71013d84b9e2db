"""The yardstick: every root-to-leaf path run alone in float64 with a plain causal softmax, one query at a time."""

import torch
from tree_shapes import paths_of


def row_by_row_attention(
    q_NHD: torch.Tensor,
    k_NHD: torch.Tensor,
    v_NHD: torch.Tensor,
    parent: list[int],
    *,
    past_k: torch.Tensor | None = None,
    past_v: torch.Tensor | None = None,
    scale: float | None = None,
    window: int | None = None,
    softcap: float | None = None,
    sinks: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Output and log-sum-exp of each token, taken from the first path it lies on; float64, differentiable."""
    q, k, v = q_NHD.double(), k_NHD.double(), v_NHD.double()
    past = 0 if past_k is None else past_k.shape[0]
    group = q.shape[1] // k.shape[1]
    out, lse = [None] * len(parent), [None] * len(parent)
    for path in paths_of(parent):
        keys, values = k[path], v[path]
        if past_k is not None and past_v is not None:
            keys, values = torch.cat([past_k.double(), keys]), torch.cat([past_v.double(), values])
        keys, values = keys.repeat_interleave(group, dim=1), values.repeat_interleave(group, dim=1)
        for depth, token in enumerate(path):
            if out[token] is not None:
                continue
            last = past + depth + 1
            first = 0 if window is None else max(0, last - window)
            scores = torch.einsum("hd,mhd->hm", q[token], keys[first:last])
            scores = scores * (q.shape[-1] ** -0.5 if scale is None else scale)
            if softcap is not None:
                scores = softcap * torch.tanh(scores / softcap)
            if sinks is not None:
                scores = torch.cat([scores, sinks.double()[:, None]], dim=1)
            weights = torch.softmax(scores, dim=-1)[:, : last - first]
            out[token] = torch.einsum("hm,mhd->hd", weights, values[first:last])
            lse[token] = torch.logsumexp(scores, dim=-1)
    if not parent:
        return q.clone(), q.new_zeros(q.shape[:2])
    return torch.stack(out), torch.stack(lse)
