"""The definition: one token at a time, from the state of its parent."""

import numpy as np
import torch

from tree_kernels.accumulation import accumulation_dtype


def reference_delta_rule(
    q_NHK: torch.Tensor,
    k_NHK: torch.Tensor,
    v_NHV: torch.Tensor,
    g_NH: torch.Tensor,
    beta_NH: torch.Tensor,
    parent: np.ndarray,
    scale: float,
    initial_state_HKV: torch.Tensor,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Outputs [N, Hv, V] in v's dtype and the states after every token, [N, Hv, K, V], in the accumulation dtype.

    Arguments as in `tree_gated_delta_rule`; `parent` is int32 [N], -1 at roots.
    """
    dtype = accumulation_dtype(v_NHV.dtype)
    group = v_NHV.shape[1] // k_NHK.shape[1]
    q, k = (t.to(dtype).repeat_interleave(group, dim=1) for t in (q_NHK, k_NHK))
    v, g, beta = (t.to(dtype) for t in (v_NHV, g_NH, beta_NH))
    states: list[torch.Tensor] = []
    outputs: list[torch.Tensor] = []
    for token, above in enumerate(parent.tolist()):
        decayed_HKV = (states[above] if above >= 0 else initial_state_HKV) * g[token].exp()[:, None, None]
        recalled_HV = torch.einsum("hkv,hk->hv", decayed_HKV, k[token])
        written_HV = beta[token][:, None] * (v[token] - recalled_HV)
        states.append(decayed_HKV + k[token][:, :, None] * written_HV[:, None, :])
        outputs.append(scale * torch.einsum("hkv,hk->hv", states[-1], q[token]))
    return torch.stack(outputs).to(v_NHV.dtype), torch.stack(states)
