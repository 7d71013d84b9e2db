"""Gated DeltaNet layers over packed rows, by the tree's kernels on a forest whose rows share nothing.

transformers' own functions would carry the state from row to row. flash-linear-attention takes longer for forward and
backward together (docs/benchmarks/kernels.md).
"""

from typing import Any

import numpy as np
import torch
from torch import nn

from tree_kernels.layout import TreeLayout
from tree_rl.benchmark.against_packed.packed_attention import PackedLayout
from tree_rl.models.recurrent.delta_net import tree_functions
from tree_rl.models.recurrent.layers import GATED_DELTA_NET, replace_during_trees

NAME = "tree kernels, rows apart"
"""What results call it."""


def use_packed_linear_attention(model: nn.Module) -> None:
    """Let every Gated DeltaNet of `model` read packed rows."""
    replace_during_trees(model, GATED_DELTA_NET, _functions, keyword="packed_layout")


def _functions(mixer: Any, layout: PackedLayout, _: object) -> dict[str, Any]:
    return tree_functions(mixer, layout.metadata("rows_apart", _rows_apart), None, impl="auto")


def _rows_apart(layout: PackedLayout) -> TreeLayout:
    """A forest of rows that share nothing."""
    ends = np.repeat(np.cumsum(layout.lengths), layout.lengths).astype(np.int32)
    return TreeLayout.from_subtree_end(torch.from_numpy(ends)).to(layout.offsets.device)
