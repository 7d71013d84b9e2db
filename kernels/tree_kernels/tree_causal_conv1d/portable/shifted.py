"""The convolution as K shifted products of the whole forest; only tokens after a jump to another branch use a gather.

Legend: N unique tokens, C channels, K taps, R tokens after a jump.
"""

import torch

from tree_kernels.accumulation import accumulation_dtype


def shifted_conv1d(
    x_NC: torch.Tensor,
    weight_CK: torch.Tensor,
    bias_C: torch.Tensor | None,
    jumps: tuple[torch.Tensor, torch.Tensor],
    context_KC: torch.Tensor,
) -> torch.Tensor:
    """Convolution [N, C] before the activation, in the accumulation dtype; `jumps` is from `jumps_of`, the rest as in
    `reference_conv1d`."""
    dtype = accumulation_dtype(x_NC.dtype)
    num_tokens, taps = x_NC.shape[0], weight_CK.shape[1]
    weight_KC = weight_CK.T.to(dtype)
    input_MC = torch.cat([context_KC, x_NC]).to(dtype)
    out_NC = sum(
        (weight_KC[tap] * input_MC[tap : tap + num_tokens] for tap in range(taps)), start=input_MC.new_zeros(())
    )
    jumping_R, input_RK = jumps
    if len(jumping_R):
        out_NC = out_NC.index_put((jumping_R,), (input_MC[input_RK] * weight_KC).sum(1))
    return out_NC if bias_C is None else out_NC + bias_C.to(dtype)
