"""Rows laid end to end without padding: what a flat run reads, each row seeing only itself.

Legend: F flat tokens, B rows, E edges.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch

from tree_kernels.host_copy import to_device
from tree_rl.benchmark.packed_attention import PackedLayout
from tree_rl.models.attention import skip_mask
from tree_rl.training.loss.edges import EdgePlan


@dataclass(frozen=True, kw_only=True, slots=True)
class PackedRows:
    """Packed rows on the device, as the model reads them."""

    input_ids_1F: torch.Tensor
    """int64 [1, F]."""
    position_ids_1F: torch.Tensor
    """int64 [1, F], from 0 in each row."""
    layout: PackedLayout
    """Row boundaries."""

    @classmethod
    def from_rows(cls, rows: Sequence[np.ndarray], device: torch.device) -> "PackedRows":
        """Pack rows of token ids (int64 [L])."""
        positions = np.concatenate([np.arange(len(row)) for row in rows])
        return cls(
            input_ids_1F=to_device(np.concatenate(rows).astype(np.int64), device)[None],
            position_ids_1F=to_device(positions, device)[None],
            layout=PackedLayout([len(row) for row in rows], device),
        )

    def model_kwargs(self) -> dict[str, object]:
        """Keyword arguments of a model built by `build_model`."""
        return {
            "input_ids": self.input_ids_1F,
            "position_ids": self.position_ids_1F,
            "attention_mask": skip_mask(self.input_ids_1F.device),
            "packed_layout": self.layout,
            "use_cache": False,
        }


def plan_packed_edges(rows: Sequence[np.ndarray], wanted_F: np.ndarray, device: torch.device) -> EdgePlan:
    """The edges of packed rows: every wanted position is a row of logits with one target, its next token.

    Args:
        rows: B of int64 [L].
        wanted_F: bool [F], positions that predict their next token; the last of a row is never wanted.
        device: where the model runs.
    """
    source = np.flatnonzero(wanted_F)
    edges = np.arange(len(source))
    return EdgePlan.of(
        source,
        edges,
        np.concatenate(rows)[source + 1].astype(np.int64),
        np.ones(len(source), dtype=np.float32),
        flat_W=source,
        edge_W=edges,
        num_flat=len(wanted_F),
        device=device,
    )


def pack_rows(lengths: Sequence[int], max_tokens: int) -> list[list[int]]:
    """Rows in few forwards of similar size: longest first, each to the least loaded forward that has room.

    Args:
        lengths: tokens of each row.
        max_tokens: of a forward; a longer row runs alone.

    Returns:
        Row indices of each forward, ascending.
    """
    bins: list[list[int]] = [[] for _ in range(-(-sum(lengths) // max_tokens))]
    load = [0] * len(bins)
    for row in sorted(range(len(lengths)), key=lambda index: (-lengths[index], index)):
        chosen = load.index(min(load))
        if load[chosen] and load[chosen] + lengths[row] > max_tokens:
            bins.append([])
            load.append(0)
            chosen = len(bins) - 1
        bins[chosen].append(row)
        load[chosen] += lengths[row]
    return [sorted(content) for content in bins if content]
