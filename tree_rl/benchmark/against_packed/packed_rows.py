"""Rows laid end to end without padding; each row sees only itself.

Legend: F flat tokens, B rows, E edges.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch

from tree_kernels.host_copy import to_device
from tree_rl.benchmark.against_packed.packed_attention import PackedLayout
from tree_rl.models.attention import skip_mask
from tree_rl.training.loss.edges import EdgePlan, FlatReads


@dataclass(frozen=True, kw_only=True, slots=True)
class PackedInputs:
    """Packed rows on the device, as the model reads them."""

    input_ids_1F: torch.Tensor
    """int64 [1, F]."""
    position_ids_1F: torch.Tensor
    """int64 [1, F], from 0 in each row."""
    layout: PackedLayout
    """Row boundaries."""

    @classmethod
    def from_rows(cls, rows: Sequence[np.ndarray], device: torch.device) -> "PackedInputs":
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
    """The edges of packed rows: wanted positions (bool [F], no row's last) predict their next token."""
    source = np.flatnonzero(wanted_F)
    edges = np.arange(len(source))
    reads = FlatReads(flat_W=to_device(source, device), edge_W=to_device(edges, device), num_flat=len(wanted_F))
    return EdgePlan(
        source_E=source,
        target_E=np.concatenate(rows)[source + 1].astype(np.int64),
        temperature_E=np.ones(len(source), dtype=np.float32),
        reads=reads,
    )
