"""The definition: one token at a time, from a window of the last K inputs on its path."""

import numpy as np
import torch

from tree_kernels.accumulation import accumulation_dtype


def reference_conv1d(
    x_NC: torch.Tensor,
    weight_CK: torch.Tensor,
    bias_C: torch.Tensor | None,
    parent: np.ndarray,
    context_KC: torch.Tensor,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Convolution [N, C] before the activation, in the accumulation dtype, and the last K - 1 inputs of every token.

    Arguments as in `tree_causal_conv1d`; `parent` is int32 [N], -1 at roots, `context_KC` the initial context.
    """
    dtype = accumulation_dtype(x_NC.dtype)
    outputs: list[torch.Tensor] = []
    contexts: list[torch.Tensor] = []
    for token, above in enumerate(parent.tolist()):
        before_KC = contexts[above] if above >= 0 else context_KC
        window_KC = torch.cat([before_KC, x_NC[token : token + 1]])
        contexts.append(window_KC[1:])
        outputs.append((weight_CK.T.to(dtype) * window_KC.to(dtype)).sum(0))
    out_NC = torch.stack(outputs)
    return out_NC if bias_C is None else out_NC + bias_C.to(dtype), torch.stack(contexts)
