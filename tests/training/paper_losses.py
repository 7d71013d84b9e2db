"""Token losses of the paper over rows: sep-avg (eq. 1), and its equal, the tree loss with weights g_t / K (boxed)."""

import torch


def token_losses(log_probs_F: torch.Tensor, *, advantage_F: torch.Tensor | None = None) -> torch.Tensor:
    """-log p per token for SFT, -A log p for a policy gradient (paper, below eq. 1); [F]."""
    return -log_probs_F if advantage_F is None else -advantage_F * log_probs_F


def weighted_loss(losses_F: torch.Tensor, mask_F: torch.Tensor, weight_F: torch.Tensor | None = None) -> torch.Tensor:
    """Sum of weight * loss over trained tokens.

    Args:
        losses_F: [F], per flat token.
        mask_F: bool [F], trained tokens.
        weight_F: [F], path weights from `tree_rl.tree.weights`; None counts every occurrence once.
    """
    kept = torch.where(mask_F, losses_F, torch.zeros_like(losses_F))
    return kept.sum() if weight_F is None else (kept * weight_F).sum()


def sep_avg_loss(losses_F: torch.Tensor, mask_F: torch.Tensor, offsets: torch.Tensor) -> torch.Tensor:
    """Mean over the K rows of the sum of their token losses: paper, eq. 1, for rows of one tree.

    Args:
        losses_F: [F].
        mask_F: bool [F].
        offsets: int64 [K + 1], row boundaries.
    """
    kept = torch.where(mask_F, losses_F, torch.zeros_like(losses_F))
    rows = [kept[start:end].sum() for start, end in zip(offsets[:-1].tolist(), offsets[1:].tolist(), strict=True)]
    return torch.stack(rows).mean()
