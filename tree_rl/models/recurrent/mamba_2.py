"""The Mamba 2 layers of Bamba and Granite 4 read trees: convolution and state follow each token's own path.

Legend: N unique tokens, C channels of the convolution, H heads, P head size, G groups, K state size, S cuts.
"""

from typing import Any

import torch
from torch import nn
from torch.nn import functional

from tree_kernels.accumulation import accumulation_dtype
from tree_kernels.layout import TreeLayout
from tree_kernels.tree_causal_conv1d import tree_causal_conv1d
from tree_kernels.tree_state_space import tree_state_space
from tree_rl.models.recurrent.layers import MAMBA_2, replace_forward_during_trees
from tree_rl.models.relay import CONTEXT, STATE, LayerRelay


def use_tree_state_space(model: nn.Module) -> None:
    """Let every Mamba 2 layer of `model` read trees; calls without a tree run transformers' own forward.

    Args:
        model: checked by `check_model`; a model without such layers is left alone.
    """
    replace_forward_during_trees(model, MAMBA_2, _forward)


def _forward(
    mixer: Any, layout: TreeLayout, relay: LayerRelay | None, hidden_states: torch.Tensor, **_: object
) -> torch.Tensor:
    """As BambaMixer.forward without a cache, with convolution and recurrence over the tree; [1, N, hidden]."""
    past = {} if relay is None else relay.past(mixer.layer_idx)
    cuts = None if relay is None else relay.cuts
    gate_NI, mixed_NC, dt_NH = (
        mixer.in_proj(hidden_states)
        .squeeze(0)
        .split([mixer.intermediate_size, mixer.conv_dim, mixer.num_heads], dim=-1)
    )
    mixed_NC, contexts = tree_causal_conv1d(
        mixed_NC,
        mixer.conv1d.weight[:, 0],
        mixer.conv1d.bias,
        layout,
        activation=mixer.activation,
        initial_context=past.get(CONTEXT),
        return_contexts_at=cuts,
    )
    group_size = mixer.n_groups * mixer.ssm_state_size
    x_NI, b_NGK, c_NGK = mixed_NC.split([mixer.intermediate_size, group_size, group_size], dim=-1)
    x_NHP = x_NI.unflatten(-1, (mixer.num_heads, mixer.head_dim))
    exact = accumulation_dtype(x_NHP.dtype)
    dt_NH = functional.softplus(dt_NH.to(exact) + mixer.dt_bias.to(exact)).clamp(*mixer.time_step_limit)
    out_NHP, states = tree_state_space(
        x_NHP,
        b_NGK.unflatten(-1, (mixer.n_groups, mixer.ssm_state_size)),
        c_NGK.unflatten(-1, (mixer.n_groups, mixer.ssm_state_size)),
        -mixer.A_log.to(exact).exp() * dt_NH,
        dt_NH,
        layout,
        initial_state=past.get(STATE),
        return_states_at=cuts,
    )
    if relay is not None:
        relay.capture(mixer.layer_idx, state=states, context=contexts, at_cuts=True)
    out_NHP = out_NHP + mixer.D[:, None] * x_NHP
    normed_NI = mixer.norm(out_NHP.flatten(1), gate_NI)
    return mixer.out_proj(normed_NI.to(hidden_states.dtype)).unsqueeze(0)
