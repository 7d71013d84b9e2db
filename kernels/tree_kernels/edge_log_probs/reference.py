"""The definition of edge log-probs: project, log_softmax, pick.

Legend: N tokens, C hidden size, V vocabulary, E edges.
"""

import torch

from tree_kernels.accumulation import accumulation_dtype
from tree_kernels.edge_log_probs.edge_values import EdgeOptions, EdgeValues


def reference_edge_log_probs(
    hidden_NC: torch.Tensor,
    head_weight_VC: torch.Tensor,
    bias_V: torch.Tensor | None,
    edge_source: torch.Tensor,
    edge_target: torch.Tensor,
    temperature: torch.Tensor | float | None,
    options: EdgeOptions,
) -> EdgeValues:
    """All E rows of logits at once; arguments as in `edge_log_probs`."""
    dtype = accumulation_dtype(hidden_NC.dtype)
    logits_EV = hidden_NC[edge_source.long()].to(dtype) @ head_weight_VC.to(dtype).T
    if bias_V is not None:
        logits_EV = logits_EV + bias_V.to(dtype)
    if options.softcap is not None:
        logits_EV = torch.tanh(logits_EV / options.softcap) * options.softcap
    if temperature is not None:
        logits_EV = logits_EV / (temperature[:, None] if isinstance(temperature, torch.Tensor) else temperature)
    log_p_EV = torch.log_softmax(logits_EV, dim=-1)
    return EdgeValues(
        log_p_EV.gather(1, edge_target.long()[:, None])[:, 0],
        -(log_p_EV.exp() * log_p_EV).sum(-1) if options.entropy else None,
        (2 * log_p_EV).exp().sum(-1).detach() if options.sum_pi_squared else None,
    )
