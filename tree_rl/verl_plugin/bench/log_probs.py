"""Log-probs of stock verl's rows where flash-attn is absent, in `tree-rl bench --against verl`.

With flash-attn verl calls its fused cross-entropy; without it, a loop over single tokens that no user of its example
scripts meets. Legend: F packed tokens, V vocabulary.
"""

from collections.abc import Iterator
from contextlib import contextmanager

import torch

from tree_kernels.edge_log_probs import logits_edge_log_probs
from tree_rl.verl_plugin.compat import torch_functional, transformer_impl


@contextmanager
def log_probs_in_one_pass() -> Iterator[str]:
    """Meanwhile stock verl's engine computes log-probs in one pass over its logits, with or without flash-attn.

    Yields:
        What computes them.
    """
    before = transformer_impl.logprobs_from_logits
    try:
        yield use_one_pass()
    finally:
        transformer_impl.logprobs_from_logits = before


def use_one_pass() -> str:
    """From now on; returns what computes log-probs."""
    if torch_functional.FLAH_ATTN_CROSS_ENTROPY_LOSS_AVAILABLE:
        return "flash-attn"
    transformer_impl.logprobs_from_logits = fused_log_probs
    return "tree_kernels, from logits"


def fused_log_probs(logits: torch.Tensor, labels: torch.Tensor, inplace_backward: bool = True) -> torch.Tensor:
    """Signature of verl's `logprobs_from_logits`; nothing is computed in place.

    Args:
        logits: [..., V].
        labels: int64 [...].
        inplace_backward: without effect.

    Returns:
        float32 [...].
    """
    logits_FV = logits.reshape(-1, logits.shape[-1])
    row_F = torch.arange(len(logits_FV), device=logits.device)
    return logits_edge_log_probs(logits_FV, row_F, labels.reshape(-1)).log_prob.view(labels.shape)
