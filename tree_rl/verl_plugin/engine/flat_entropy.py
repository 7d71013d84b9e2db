"""Entropy of rows that run through verl's own forward, where a step reports it and no loss reads it.

verl would keep it in the graph of the update, and with it copies of the logits. Legend: B rows, L padded length, F flat
tokens of all rows, V vocabulary.
"""

from collections.abc import Mapping
from typing import Any

import torch

from tree_rl.verl_plugin.compat import torch_functional

MOST_ROWS_OF_LOGITS = 512
"""Rows of logits that are in work at a time."""


@torch.no_grad()
def entropy_of_rows(logits: torch.Tensor, forward_arguments: Mapping[str, Any], offsets: torch.Tensor) -> torch.Tensor:
    """Entropy of every position, nested as verl's outputs are, without a graph.

    Args:
        logits: of verl's forward, before the temperature: [1, F or more, V] packed, [B, L, V] padded.
        forward_arguments: verl's `output_args`, with the temperatures.
        offsets: int64 [B + 1], of the rows in F.
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
    """verl's entropy [F] of its scaled logits, a piece at a time."""
    pieces = zip(logits_FV.split(MOST_ROWS_OF_LOGITS), temperature_F.split(MOST_ROWS_OF_LOGITS), strict=True)
    scaled = (piece / heat.clamp(min=1e-8).to(piece.dtype).unsqueeze(-1) for piece, heat in pieces)
    return torch.cat([torch_functional.entropy_from_logits(piece) for piece in scaled])
