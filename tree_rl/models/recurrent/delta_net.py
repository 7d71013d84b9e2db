"""Lets Gated DeltaNet layers read trees by replacing two functions of the mixer.

A layer calls `causal_conv1d_fn` and `chunk_gated_delta_rule` of its mixer. A forward with `tree_layout=` replaces them
by tree versions. Projections, gates and the gated norm do not change.
Legend: N unique tokens, n tokens of a rank's slice, C channels, H heads, K and V state sizes.
"""

from functools import partial
from typing import Any

import torch
from torch import nn

from tree_kernels.accumulation import accumulation_dtype
from tree_kernels.tree_causal_conv1d import tree_causal_conv1d
from tree_kernels.tree_gated_delta_rule import tree_gated_delta_rule
from tree_kernels.tree_layout import TreeLayout
from tree_rl.models.recurrent.layers import GATED_DELTA_NET, replace_during_trees
from tree_rl.models.recurrent.own_heads import (
    Heads,
    channels_of_tokens,
    heads_of_channels,
    own_channels,
    tokens_of_heads,
)
from tree_rl.models.relay import CONTEXT, STATE, LayerRelay, relay_number
from tree_rl.models.sequence_parallel import SequenceParallel

NORM_EPSILON = 1e-6


def use_tree_linear_attention(model: nn.Module, *, impl: str = "auto") -> None:
    """Let every Gated DeltaNet layer of `model`, if any, read trees; calls without a tree run as before.

    `impl` is the implementation of `tree_kernels.tree_gated_delta_rule`.
    """
    replace_during_trees(model, GATED_DELTA_NET, partial(tree_functions, impl=impl))


def tree_functions(
    mixer: Any, layout: TreeLayout, relay: LayerRelay | None, ranks: SequenceParallel | None, *, impl: str
) -> dict[str, Any]:
    """Replacements for a mixer's functions during one forward over a tree.

    Args:
        mixer: a Gated DeltaNet mixer.
        layout: layout of the forward.
        relay: relay of the partition, or None.
        ranks: ranks that share the tokens, or None.
        impl: implementation of `tree_kernels.tree_gated_delta_rule`.
    """
    call = _TreeCall(mixer, layout, relay, ranks, impl)
    return {"causal_conv1d_fn": call.conv, "chunk_gated_delta_rule": call.delta_rule}


class _TreeCall:
    """One mixer's call in a forward over a tree; the relay provides the state and context of a past."""

    def __init__(
        self, mixer: Any, layout: TreeLayout, relay: LayerRelay | None, ranks: SequenceParallel | None, impl: str
    ) -> None:
        self._mixer = mixer
        self._layout = layout
        self._relay = relay
        self._ranks = ranks
        self._impl = impl
        keys = Heads(mixer.num_k_heads, mixer.head_k_dim)
        self._blocks = (keys, keys, Heads(mixer.num_v_heads, mixer.head_v_dim))
        self._own_mixed_NC: torch.Tensor | None = None
        self._past = {} if relay is None else relay.past(relay_number(mixer))
        self._contexts: torch.Tensor | None = None

    @property
    def _cuts(self) -> tuple[int, ...] | None:
        return None if self._relay is None else self._relay.cuts

    def conv(
        self,
        x: torch.Tensor,
        weight: torch.Tensor,
        bias: torch.Tensor | None = None,
        activation: str | None = None,
        **_: object,
    ) -> torch.Tensor:
        """Replaces causal_conv1d_fn; input and output are [1, C, n]."""
        blocks, ranks = self._blocks, self._ranks
        out_NC, self._contexts = tree_causal_conv1d(
            channels_of_tokens(x.squeeze(0).T, blocks, ranks),
            own_channels(weight, blocks, ranks),
            None if bias is None else own_channels(bias, blocks, ranks),
            self._layout,
            activation=activation,
            initial_context=self._past.get(CONTEXT),
            return_contexts_at=self._cuts,
        )
        if ranks is None:
            return out_NC.T.unsqueeze(0)
        # The delta rule needs these heads for all tokens, so they are kept here. The layer only splits the returned
        # tensor into queries, keys and values, which `delta_rule` then ignores.
        self._own_mixed_NC = out_NC
        return x

    def delta_rule(
        self,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        *,
        g: torch.Tensor,
        beta: torch.Tensor,
        use_qk_l2norm_in_kernel: bool = False,
        **_: object,
    ) -> tuple[torch.Tensor, None]:
        """Replaces chunk_gated_delta_rule; query, key, value and output are [1, n, H, D]."""
        if self._own_mixed_NC is None:
            # The layer repeats queries and keys for each of their value heads; the kernel needs each once.
            repeats = self._mixer.num_v_heads // self._mixer.num_k_heads
            q_NHK, k_NHK, v_NHV = query.squeeze(0)[:, ::repeats], key.squeeze(0)[:, ::repeats], value.squeeze(0)
        else:
            q_NHK, k_NHK, v_NHV = heads_of_channels(self._own_mixed_NC, self._blocks, self._ranks)
        g_NH, beta_NH = self._gates(g.squeeze(0), beta.squeeze(0))
        if use_qk_l2norm_in_kernel:
            q_NHK, k_NHK = _of_unit_length(q_NHK), _of_unit_length(k_NHK)
        out_NHV, states_SHKV = tree_gated_delta_rule(
            q_NHK,
            k_NHK,
            v_NHV,
            g_NH,
            beta_NH,
            self._layout,
            initial_state=self._past.get(STATE),
            return_states_at=self._cuts,
            impl=self._impl,
        )
        if self._relay is not None:
            self._relay.capture(relay_number(self._mixer), state=states_SHKV, context=self._contexts, at_cuts=True)
        return tokens_of_heads(out_NHV, self._ranks).unsqueeze(0), None

    def _gates(self, g_nH: torch.Tensor, beta_nH: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Gates of all tokens for this rank's heads."""
        if self._ranks is None:
            return g_nH, beta_nH
        dtype = torch.promote_types(g_nH.dtype, beta_nH.dtype)
        both_NH2 = self._ranks.heads_of_tokens(torch.stack([g_nH.to(dtype), beta_nH.to(dtype)], dim=-1))
        return both_NH2[..., 0].to(g_nH), both_NH2[..., 1].to(beta_nH)


def _of_unit_length(t_NHK: torch.Tensor) -> torch.Tensor:
    """L2 normalisation as in the models' kernels, accumulated in at least float32."""
    exact = t_NHK.to(accumulation_dtype(t_NHK.dtype))
    return (exact * torch.rsqrt(exact.square().sum(-1, keepdim=True) + NORM_EPSILON)).to(t_NHK.dtype)
