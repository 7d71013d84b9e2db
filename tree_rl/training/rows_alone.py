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
        pieces.append(next_log_probs(logits_LV, ids_1L[0], temperature))
    return torch.cat(pieces)


def next_log_probs(logits_LV: torch.Tensor, ids_L: torch.Tensor, temperature: float) -> torch.Tensor:
    """Log-prob of every next token of a row, [L], 0 at its end, from all of its logits."""
    logits_LV = logits_LV.to(torch.promote_types(logits_LV.dtype, torch.float32)) / temperature
    found = logits_LV[:-1].log_softmax(-1).gather(1, ids_L[1:, None]).squeeze(1)
    return torch.cat([found, found.new_zeros(1)])
