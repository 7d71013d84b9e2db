"""Every row by itself through the plain model: slow and simple, the reference for tree results."""

from collections.abc import Sequence

import torch
from torch import nn


def branch_log_probs(model: nn.Module, rows: Sequence[Sequence[int]], *, temperature: float = 1.0) -> torch.Tensor:
    """Log-prob of every next token, row after row, [F]; 0 at a row's end. Calls the causal language model per row."""
    device = next(model.parameters()).device
    pieces = []
    for row in rows:
        ids_1L = torch.tensor([list(row)], dtype=torch.long, device=device)
        logits_LV = model(input_ids=ids_1L, use_cache=False).logits[0]
        logits_LV = logits_LV.to(torch.promote_types(logits_LV.dtype, torch.float32)) / temperature
        log_probs_LV = logits_LV.log_softmax(-1)
        next_ids = ids_1L[0, 1:, None]
        pieces += [log_probs_LV[:-1].gather(1, next_ids).squeeze(1), log_probs_LV.new_zeros(1)]
    return torch.cat(pieces)
