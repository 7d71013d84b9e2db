"""Lets Mamba 2 layers read trees: convolution and state follow each token's path.

Legend: N unique tokens, n tokens of a rank's slice, C channels of the convolution, I channels of all heads, H heads, P
head size, G groups, K state size.
"""

import math
import sys
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.nn import functional

from tree_kernels.accumulation import accumulation_dtype
from tree_kernels.tree_causal_conv1d import tree_causal_conv1d
from tree_kernels.tree_layout import TreeLayout
from tree_kernels.tree_state_space import tree_state_space
from tree_rl.models.recurrent.layers import MAMBA_2, replace_forward_during_trees
from tree_rl.models.recurrent.own_heads import (
    Heads,
    channels_of_tokens,
    heads_of_channels,
    heads_of_tokens,
    own_channels,
    own_heads,
    tokens_of_heads,
)
from tree_rl.models.relay import CONTEXT, STATE, LayerRelay, relay_number
from tree_rl.models.sequence_parallel import SequenceParallel

LEAST_TIME_STEP = frozenset({"NemotronHMamba2Mixer", "Zamba2MambaMixer"})
"""Mixers whose plain path in transformers raises every time step to `time_step_min`."""


def use_tree_state_space(model: nn.Module, *, impl: str = "auto") -> None:
    """Let every Mamba 2 layer of `model`, if any, read trees; calls without a tree run as before.

    `impl` is the implementation of `tree_kernels.tree_state_space`.
    """
    replace_forward_during_trees(model, MAMBA_2, partial(tree_forward, impl=impl))


def tree_forward(
    mixer: Any,
    layout: TreeLayout,
    relay: LayerRelay | None,
    ranks: SequenceParallel | None,
    hidden_states: torch.Tensor,
    *,
    impl: str = "auto",
    **_: object,
) -> torch.Tensor:
    """A mixer's forward without a cache, with convolution and recurrence over the tree; output [1, n, hidden]."""
    past = {} if relay is None else relay.past(relay_number(mixer))
    cuts = None if relay is None else relay.cuts
    shared = Heads(mixer.n_groups, mixer.ssm_state_size)
    blocks = (Heads(mixer.num_heads, mixer.head_dim), shared, shared)
    gate_nI, mixed_nC, dt_nH = (
        _projected(mixer, hidden_states)
        .squeeze(0)
        .split([mixer.intermediate_size, mixer.conv_dim, mixer.num_heads], dim=-1)
    )
    bias_C = mixer.conv1d.bias
    mixed_NC, contexts = tree_causal_conv1d(
        channels_of_tokens(mixed_nC, blocks, ranks),
        own_channels(mixer.conv1d.weight[:, 0], blocks, ranks),
        None if bias_C is None else own_channels(bias_C, blocks, ranks),
        layout,
        activation=mixer.activation,
        initial_context=past.get(CONTEXT),
        return_contexts_at=cuts,
    )
    x_NHP, b_NGK, c_NGK = heads_of_channels(mixed_NC, blocks, ranks)
    dt_NH = heads_of_tokens(dt_nH.unsqueeze(-1), ranks).squeeze(-1)
    exact = accumulation_dtype(x_NHP.dtype)
    dt_NH = functional.softplus(dt_NH.to(exact) + own_heads(mixer.dt_bias, ranks).to(exact)).clamp(
        *_time_step_limits(mixer)
    )
    out_NHP, states = tree_state_space(
        x_NHP,
        b_NGK,
        c_NGK,
        -own_heads(mixer.A_log, ranks).to(exact).exp() * dt_NH,
        dt_NH,
        layout,
        initial_state=past.get(STATE),
        return_states_at=cuts,
        impl=impl,
    )
    if relay is not None:
        relay.capture(relay_number(mixer), state=states, context=contexts, at_cuts=True)
    out_nHP = tokens_of_heads(out_NHP + own_heads(mixer.D, ranks)[:, None] * x_NHP, ranks)
    # The norm spans all heads of a token, so it runs after the exchange.
    out_nI = _gated(mixer, out_nHP.flatten(1), gate_nI)
    return mixer.out_proj(out_nI.to(hidden_states.dtype)).unsqueeze(0)


def _projected(mixer: Any, hidden_states: torch.Tensor) -> torch.Tensor:
    """Gate, channels of the convolution and time steps, with the multipliers of Falcon-H1."""
    if not hasattr(mixer, "mup_vector"):
        return mixer.in_proj(hidden_states)
    projected = mixer.in_proj(hidden_states * mixer.ssm_in_multiplier)
    return (projected * mixer.mup_vector).to(projected.dtype)


def _time_step_limits(mixer: Any) -> tuple[float, float]:
    """Least and largest time step: transformers' plain path of some families has `time_step_min` as the least one,
    their path through mamba-ssm does not."""
    runs_mamba_ssm = mixer.in_proj.weight.is_cuda and sys.modules[type(mixer).__module__].is_fast_path_available
    if type(mixer).__name__ in LEAST_TIME_STEP and not runs_mamba_ssm:
        return mixer.time_step_min, math.inf
    return mixer.time_step_limit or (0.0, math.inf)


def _gated(mixer: Any, out_nI: torch.Tensor, gate_nI: torch.Tensor) -> torch.Tensor:
    """The gated norm; Falcon-H1 may have a gate only."""
    if getattr(mixer, "mamba_rms_norm", True):
        return mixer.norm(out_nI, gate_nI)
    return out_nI * functional.silu(gate_nI)
