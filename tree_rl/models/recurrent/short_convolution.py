"""Lets the gated short convolutions of LFM2 read trees: every token sees the last inputs on its path.

Legend: N unique tokens, n tokens of a rank's slice, C channels, K taps, S cuts.
"""

from typing import Any

import torch
from torch import nn

from tree_kernels.tree_causal_conv1d import tree_causal_conv1d
from tree_kernels.tree_layout import TreeLayout
from tree_rl.models.recurrent.layers import SHORT_CONVOLUTION, replace_forward_during_trees
from tree_rl.models.recurrent.own_heads import Heads, channels_of_tokens, own_channels, tokens_of_heads
from tree_rl.models.relay import CONTEXT, LayerRelay, relay_number
from tree_rl.models.sequence_parallel import SequenceParallel


def use_tree_short_convolution(model: nn.Module) -> None:
    """Let every short convolution of `model`, if any, read trees; calls without a tree run as before."""
    replace_forward_during_trees(model, SHORT_CONVOLUTION, _forward)


def _forward(
    mixer: Any,
    layout: TreeLayout,
    relay: LayerRelay | None,
    ranks: SequenceParallel | None,
    hidden_states: torch.Tensor,
    **_: object,
) -> torch.Tensor:
    """Lfm2ShortConv.forward with the convolution over the tree; input and output [1, n, C]."""
    gate_nC, out_gate_nC, x_nC = mixer.in_proj(hidden_states).squeeze(0).chunk(3, dim=-1)
    bias_C, channels = mixer.conv.bias, (Heads(x_nC.shape[1], 1),)
    out_NC, contexts_SKC = tree_causal_conv1d(
        channels_of_tokens(gate_nC * x_nC, channels, ranks),
        own_channels(mixer.conv.weight[:, 0], channels, ranks),
        None if bias_C is None else own_channels(bias_C, channels, ranks),
        layout,
        initial_context=None if relay is None else relay.past(relay_number(mixer)).get(CONTEXT),
        return_contexts_at=None if relay is None else relay.cuts,
    )
    if relay is not None:
        relay.capture(relay_number(mixer), context=contexts_SKC, at_cuts=True)
    out_nC = tokens_of_heads(out_NC.unsqueeze(1), ranks).flatten(1)
    return mixer.out_proj((out_gate_nC * out_nC).unsqueeze(0))
