"""Gated DeltaNet layers over packed rows: flash-linear-attention where it runs, else the tree's kernels.

transformers' own functions would carry the state from row to row. Legend: F packed tokens, H heads, D state size.
"""

import functools
from typing import Any

import numpy as np
import torch
from torch import nn

from tree_kernels.layout import TreeLayout
from tree_rl.benchmark.against_packed.packed_attention import HALF, PackedLayout
from tree_rl.models.recurrent.delta_net import tree_functions
from tree_rl.models.recurrent.layers import GATED_DELTA_NET, replace_during_trees

FLA, OURS = "fla", "tree kernels, rows apart"
PROBE_TOKENS = 128


def use_packed_linear_attention(model: nn.Module) -> None:
    """Let every Gated DeltaNet of `model` read packed rows."""
    replace_during_trees(model, GATED_DELTA_NET, _functions, keyword="packed_layout")


@functools.cache
def chosen_implementation(device: torch.device, dtype: torch.dtype, state_size: int) -> str:
    """What packed rows run: `FLA` if its forward and backward run on this device in this dtype, else `OURS`."""
    if device.type != "cuda" or dtype not in HALF:
        return OURS
    try:
        q, k, v = (torch.randn(1, PROBE_TOKENS, 1, state_size, device=device, dtype=dtype) for _ in range(3))
        q.requires_grad_()
        g, beta = (torch.rand(1, PROBE_TOKENS, 1, device=device) for _ in range(2))
        offsets = torch.tensor([0, PROBE_TOKENS], device=device)
        _fla(offsets, q, k, v, g=-g, beta=beta, use_qk_l2norm_in_kernel=True)[0].sum().backward()
    except (ImportError, RuntimeError, NotImplementedError):
        # It refuses its backward on Hopper with Triton 3.4 to 3.7.0.
        return OURS
    return FLA


def _functions(mixer: Any, layout: PackedLayout, _: object) -> dict[str, Any]:
    ours = tree_functions(mixer, layout.metadata("rows_apart", _rows_apart), None, impl="auto")

    def delta_rule(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, **more: Any) -> tuple[torch.Tensor, None]:
        """In place of chunk_gated_delta_rule: all [1, F, H, D]."""
        names = ("g", "beta", "use_qk_l2norm_in_kernel")
        more = {name: more[name] for name in names if name in more}
        if chosen_implementation(v.device, v.dtype, v.shape[-1]) == FLA:
            return _fla(layout.offsets, q, k, v, **more)
        return ours["chunk_gated_delta_rule"](q, k, v, **more)

    return {**ours, "chunk_gated_delta_rule": delta_rule}


def _fla(offsets: torch.Tensor, *tensors: torch.Tensor, **more: Any) -> tuple[torch.Tensor, None]:
    from fla.ops.gated_delta_rule import chunk_gated_delta_rule

    return chunk_gated_delta_rule(*tensors, **more, cu_seqlens=offsets)[0], None


def _rows_apart(layout: PackedLayout) -> TreeLayout:
    """A forest of rows that share nothing."""
    ends = np.repeat(np.cumsum(layout.lengths), layout.lengths).astype(np.int32)
    return TreeLayout.from_subtree_end(torch.from_numpy(ends)).to(layout.offsets.device)
