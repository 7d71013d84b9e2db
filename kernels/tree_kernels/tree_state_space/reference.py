"""The definition: one token at a time, from the state of its parent."""

import numpy as np
import torch

from tree_kernels.accumulation import accumulation_dtype


def reference_state_space(
    x_NHP: torch.Tensor,
    b_NGK: torch.Tensor,
    c_NGK: torch.Tensor,
    g_NH: torch.Tensor,
    dt_NH: torch.Tensor,
    parent: np.ndarray,
    initial_state_HKP: torch.Tensor,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Outputs [N, H, P] in x's dtype and the states after every token, [N, H, K, P], in the accumulation dtype.

    Arguments as in `tree_state_space`; `parent` is int32 [N], -1 at roots.
    """
    dtype = accumulation_dtype(x_NHP.dtype)
    group = x_NHP.shape[1] // b_NGK.shape[1]
    b, c = (t.to(dtype).repeat_interleave(group, dim=1) for t in (b_NGK, c_NGK))
    x, g, dt = (t.to(dtype) for t in (x_NHP, g_NH, dt_NH))
    states: list[torch.Tensor] = []
    outputs: list[torch.Tensor] = []
    for token, above in enumerate(parent.tolist()):
        decayed_HKP = (states[above] if above >= 0 else initial_state_HKP) * g[token].exp()[:, None, None]
        written_HP = dt[token][:, None] * x[token]
        states.append(decayed_HKP + b[token][:, :, None] * written_HP[:, None, :])
        outputs.append(torch.einsum("hkp,hk->hp", states[-1], c[token]))
    return torch.stack(outputs).to(x_NHP.dtype), torch.stack(states)
