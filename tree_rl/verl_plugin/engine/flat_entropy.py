"""Entropy of rows that run through verl's forward, for steps that report it but have no entropy loss.

verl would keep it in the update's graph, with copies of the logits. Legend: B rows, L padded length, F flat tokens of
all rows, V vocabulary.
"""

from collections.abc import Mapping
from typing import Any

import torch

from tree_rl.verl_plugin.compat import torch_functional

MOST_ROWS_OF_LOGITS = 512
"""Number of positions whose logits are processed at a time."""


@torch.no_grad()
def entropy_of_rows(logits: torch.Tensor, forward_arguments: Mapping[str, Any], offsets: torch.Tensor) -> torch.Tensor:
    """Entropy of every position, nested like verl's outputs, without a graph.

    Args:
        logits: logits of verl's forward, before the temperature: [1, F or more, V] packed, [B, L, V] padded.
        forward_arguments: verl's `output_args`, with the temperatures.
        offsets: int64 [B + 1], offsets of the rows in F.
    """
    if "temperature_rmpad" in forward_arguments:
        total = int(offsets[-1])
        entropy_F = _entropy(logits[0, :total], forward_arguments["temperature_rmpad"][:total])
    else:
        lengths, temperature_B = offsets.diff().tolist(), forward_arguments["temperature"]
        rows = zip(logits, lengths, temperature_B, strict=True)
        entropy_F = torch.cat([_entropy(row[:length], heat.expand(length)) for row, length, heat in rows])
    return torch.nested.nested_tensor_from_jagged(entropy_F, offsets)


def _entropy(logits_FV: torch.Tensor, temperature_F: torch.Tensor) -> torch.Tensor:
    """verl's entropy [F] of its scaled logits, computed in pieces."""
    pieces = zip(logits_FV.split(MOST_ROWS_OF_LOGITS), temperature_F.split(MOST_ROWS_OF_LOGITS), strict=True)
    scaled = (piece / heat.clamp(min=1e-8).to(piece.dtype).unsqueeze(-1) for piece, heat in pieces)
    return torch.cat([torch_functional.entropy_from_logits(piece) for piece in scaled])
