"""Load of experts in logical tokens: a token of a tree counts once per row through it, as in the flat run.

Legend: N tokens of a forward, L Mixture-of-Experts layers, E experts of a layer, K experts per token, g multiplicity.
"""

from collections.abc import Sequence

import torch
from torch.utils.checkpoint import checkpoint


def expert_load(chosen_NLK: torch.Tensor, count_N: torch.Tensor, num_experts: int) -> torch.Tensor:
    """Number of logical tokens per expert.

    Args:
        chosen_NLK: integer, experts of each token.
        count_N: g, rows through each token; tokens with 0 do not count.
        num_experts: E.

    Returns:
        float64 [L, E]; integers, so sums are exact in any order.
    """
    num_layers, per_token = chosen_NLK.shape[1:]
    first_of_layer = torch.arange(num_layers, device=chosen_NLK.device)[:, None] * num_experts
    counts = count_N.double()[:, None, None].expand(-1, num_layers, per_token)
    load = torch.zeros(num_layers * num_experts, dtype=torch.float64, device=chosen_NLK.device)
    load.index_add_(0, (chosen_NLK.long() + first_of_layer).flatten(), counts.flatten())
    return load.view(num_layers, num_experts)


def balance_weight(load_LE: torch.Tensor, num_tokens: float) -> torch.Tensor:
    """Weight of a logical token's router probabilities; the auxiliary loss is the sum of weight times probability.

    It is transformers' `load_balancing_loss_func`, over the concatenated tokens of all layers,
    E * sum_e (load_e / (L T)) * (probability_e / (L T)). The load has no gradient. Once the load of all tokens is
    known, of one forward or of all rows on all ranks, the loss is linear in the probabilities, so the losses of
    partitions add up exactly.

    Args:
        load_LE: logical load of all T tokens.
        num_tokens: T, number of logical tokens, at least 1.

    Returns:
        float64 [L, E].
    """
    num_layers, num_experts = load_LE.shape
    return (num_experts * load_LE.sum(0) / (num_layers * num_tokens) ** 2).expand(num_layers, -1)


def balance_loss(logits: Sequence[torch.Tensor], count_N: torch.Tensor, weight_LE: torch.Tensor) -> torch.Tensor:
    """These tokens' share of the auxiliary loss; the shares of all tokens that are counted in `weight_LE` sum to it.

    Args:
        logits: L tensors [N, E], router logits with their graph.
        count_N: g, rows through each token.
        weight_LE: from `balance_weight`.

    Returns:
        A scalar in at least float32.
    """
    # Checkpointed, because the probabilities of all layers would take more memory than the logits themselves.
    shares = [
        checkpoint(_layer_share, layer_logits_NE, count_N, weight_E, use_reentrant=False)
        for layer_logits_NE, weight_E in zip(logits, weight_LE, strict=True)
    ]
    return torch.stack(shares).sum()


def _layer_share(logits_NE: torch.Tensor, count_N: torch.Tensor, weight_E: torch.Tensor) -> torch.Tensor:
    dtype = torch.promote_types(logits_NE.dtype, torch.float32)
    probability_NE = torch.softmax(logits_NE, dim=-1, dtype=dtype)
    # Not a matrix product, which autocast would run in half precision.
    cost_N = (probability_NE * weight_E.to(dtype)).sum(dim=-1)
    return (cost_N * count_N).sum()
