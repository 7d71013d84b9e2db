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
    before = () if past_k is None or past_v is None else (past_k.double(), past_v.double())
    past, group = len(before[0]) if before else 0, q.shape[1] // k.shape[1]
    found: dict[int, tuple[torch.Tensor, torch.Tensor]] = {}
    for path in paths_of(parent):
        keys, values = (torch.cat([*before[at : at + 1], t[path]]) for at, t in enumerate((k, v)))
        keys, values = keys.repeat_interleave(group, dim=1), values.repeat_interleave(group, dim=1)
        for depth, token in enumerate(path):
            last = past + depth + 1
            first = 0 if window is None else max(0, last - window)
            scores = torch.einsum("hd,mhd->hm", q[token], keys[first:last])
            scores = scores * (q.shape[-1] ** -0.5 if scale is None else scale)
            if softcap is not None:
                scores = softcap * torch.tanh(scores / softcap)
            if sinks is not None:
                scores = torch.cat([scores, sinks.double()[:, None]], dim=1)
            out = torch.einsum("hm,mhd->hd", scores.softmax(-1)[:, : last - first], values[first:last])
            found.setdefault(token, (out, scores.logsumexp(-1)))
    outputs, sums = zip(*(found[token] for token in range(len(parent))), strict=True)
    return torch.stack(outputs), torch.stack(sums)
