"""The gated short convolutions of LFM2 read trees: every token sees the last inputs on its own path.

Legend: N unique tokens, C channels, K taps, S cuts.
"""

from typing import Any

import torch
from torch import nn

from tree_kernels.layout import TreeLayout
from tree_kernels.tree_causal_conv1d import tree_causal_conv1d
from tree_rl.models.recurrent.layers import SHORT_CONVOLUTION, replace_forward_during_trees
from tree_rl.models.relay import CONTEXT, LayerRelay


def use_tree_short_convolution(model: nn.Module) -> None:
    """Let every short convolution of `model` read trees; calls without a tree run transformers' own forward.

    Args:
        model: checked by `check_model`; a model without such layers is left alone.
    """
    replace_forward_during_trees(model, SHORT_CONVOLUTION, _forward)


def _forward(
    mixer: Any, layout: TreeLayout, relay: LayerRelay | None, hidden_states: torch.Tensor, **_: object
) -> torch.Tensor:
    """As Lfm2ShortConv.forward, with the convolution over the tree; [1, N, C] in and out."""
    gate_NC, out_gate_NC, x_NC = mixer.in_proj(hidden_states).squeeze(0).chunk(3, dim=-1)
    out_NC, contexts_SKC = tree_causal_conv1d(
        gate_NC * x_NC,
        mixer.conv.weight[:, 0],
        mixer.conv.bias,
        layout,
        initial_context=None if relay is None else relay.past(mixer.layer_idx).get(CONTEXT),
        return_contexts_at=None if relay is None else relay.cuts,
    )
    if relay is not None:
        relay.capture(mixer.layer_idx, context=contexts_SKC, at_cuts=True)
    return mixer.out_proj((out_gate_NC * out_NC).unsqueeze(0))
