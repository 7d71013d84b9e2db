"""Registers tree attention with transformers' attention interface.

A forward with `tree_layout=` reads one DFS-serialised forest (paper, "Attention Mask"); other calls run the attention
that the model was loaded with. The layout is passed as a keyword, so gradient checkpointing keeps it. With
`sequence_parallel=` a layer holds a slice of the tokens, and attention reads all tokens with a slice of the heads.
"""

import math
import sys
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.nn.functional import pad
from transformers import PreTrainedModel
from transformers.masking_utils import ALL_MASK_ATTENTION_FUNCTIONS
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from tree_kernels.tree_attention import tree_attention
from tree_kernels.tree_layout import TreeLayout
from tree_rl.models.language_model import language_model
from tree_rl.models.layer_keywords import pass_keywords_to_layers
from tree_rl.models.recurrent.delta_net import use_tree_linear_attention
from tree_rl.models.recurrent.layers import kind_of
from tree_rl.models.recurrent.mamba_2 import use_tree_state_space
from tree_rl.models.recurrent.short_convolution import use_tree_short_convolution
from tree_rl.models.relay import KEYS, VALUES, LayerRelay, LayerTensors, number_relays, relay_number
from tree_rl.models.routers.trace import KEYWORD as ROUTER_TRACE
from tree_rl.models.sequence_parallel import SequenceParallel
from tree_rl.models.stock_windows import find_stock_windows
from tree_rl.models.stubs import attention_named
from tree_rl.models.support import UnsupportedModelError, check_model
from tree_rl.models.text_forward import use_language_model
from tree_rl.models.tiled_mlp import KEYWORD as TILE_TOKENS
from tree_rl.models.tiled_mlp import use_tiled_mlp

PREFIX = "tree_rl_over_"
BY = "_by_"

# transformers does not build a mask, which would have N x N entries, if it is given one with four dimensions.
SKIP_MASK_SHAPE = (1, 1, 1, 1)

WINDOW = "_window_of_mask"
"""Attribute of an attention module: the window in the mask that transformers builds for it without a tree."""
READY = "_reads_trees"
"""Attribute of a language model whose layers read trees."""

UNRESTRICTING = frozenset(
    {
        *("position_ids", "cache_position", "position_embeddings", "past_key_values", "is_causal"),
        *("use_cache", "output_attentions", "output_hidden_states", "output_router_logits", "return_dict"),
        *("num_items_in_batch", "layer_idx", "deterministic", ROUTER_TRACE, TILE_TOKENS),
    }
)
"""Keywords of transformers' attention interface that do not affect which tokens see which."""


def attention_name(flat_implementation: str, *, impl: str, deterministic: bool) -> str:
    """Name under which tree attention over `flat_implementation` is registered with transformers.

    transformers loads a kernel for every name that contains "flash" and downloads one for every "owner/name", so the
    name avoids both: "flash_attention_2" becomes "fa_attention_2".
    """
    by = "" if impl == "auto" and not deterministic else f"{BY}{impl}{'_deterministic' if deterministic else ''}"
    return f"{PREFIX}{flat_implementation.replace('flash', 'fa').replace('/', '.')}{by}"


def use_tree_attention(
    model: PreTrainedModel,
    *,
    impl: str = "auto",
    deterministic: bool = False,
    delta_rule_impl: str = "auto",
    state_space_impl: str = "auto",
) -> str:
    """Let every attention and recurrent layer of `model` read trees; calls without a tree run as before.

    Args:
        model: a Hugging Face causal language model or token classifier, before any wrapping.
        impl: implementation of `tree_kernels.tree_attention`.
        deterministic: run only implementations that give the same bits at every call.
        delta_rule_impl: implementation of `tree_kernels.tree_gated_delta_rule`.
        state_space_impl: implementation of `tree_kernels.tree_state_space`.

    Returns:
        The implementation that calls without a tree keep, for example "sdpa".

    Raises:
        UnsupportedModelError: trees cannot run this model exactly (`check_model`).
    """
    text_model = language_model(model)
    flat = text_model.config._attn_implementation
    if flat.startswith(PREFIX):
        flat = str(ALL_ATTENTION_FUNCTIONS[flat].keywords["flat_implementation"])
        # A model that shares its config with one that reads trees does not read them yet.
        if READY in vars(text_model):
            return flat
    check_model(model)
    use_language_model(model)
    model = text_model
    _keep_windows(model)
    name = attention_name(flat, impl=impl, deterministic=deterministic)
    forward = partial(_attention_forward, flat_implementation=flat, impl=impl, deterministic=deterministic)
    ALL_ATTENTION_FUNCTIONS.register(name, forward)
    if flat in ALL_MASK_ATTENTION_FUNCTIONS:
        ALL_MASK_ATTENTION_FUNCTIONS.register(name, ALL_MASK_ATTENTION_FUNCTIONS[flat])
    model.set_attn_implementation(name)
    number_relays([module for module in model.modules() if _relays(module)])
    pass_keywords_to_layers(model)
    use_tree_linear_attention(model, impl=delta_rule_impl)
    use_tree_short_convolution(model)
    use_tree_state_space(model, impl=state_space_impl)
    use_tiled_mlp(model)
    vars(model)[READY] = True
    return flat


def _keep_windows(model: nn.Module) -> None:
    """Set `WINDOW` on every attention module of a model that `check_model` took."""
    windows = find_stock_windows(model)
    assert not isinstance(windows, str), windows
    for module, window in windows.items():
        vars(module)[WINDOW] = window


def _relays(module: Any) -> bool:
    return hasattr(module, "layer_idx") and (hasattr(module, "is_causal") or kind_of(module) is not None)


def skip_mask(device: torch.device | str) -> torch.Tensor:
    """The `attention_mask` to pass with `tree_layout`: it keeps transformers from building an N x N mask."""
    return torch.ones(SKIP_MASK_SHAPE, dtype=torch.bool, device=device)


def _attention_forward(
    module: Any,
    query_1HND: torch.Tensor,
    key_1HND: torch.Tensor,
    value_1HND: torch.Tensor,
    attention_mask: torch.Tensor | None,
    dropout: float = 0.0,
    scaling: float | None = None,
    sliding_window: int | None = None,
    softcap: float | None = None,
    s_aux: torch.Tensor | None = None,
    *,
    flat_implementation: str,
    impl: str,
    deterministic: bool,
    tree_layout: TreeLayout | None = None,
    kv_relay: LayerRelay | None = None,
    sequence_parallel: SequenceParallel | None = None,
    **kwargs: object,
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Implements transformers' attention interface; the output is [1, N, H, D], D of the values."""
    if tree_layout is None:
        optional = {"sliding_window": sliding_window, "softcap": softcap, "s_aux": s_aux}
        given = {name: value for name, value in optional.items() if value is not None}
        flat_forward = _flat_attention(module, flat_implementation)
        # Flash attention needs values of the keys' size. Layers pad them if the name in the config contains "flash",
        # which the name of tree attention does not.
        missing = key_1HND.shape[-1] - value_1HND.shape[-1] if "flash" in flat_implementation else 0
        # Flash attention chooses its kernel by the name in the config.
        with attention_named(flat_implementation, module.config):
            out, weights = flat_forward(
                module,
                query_1HND,
                key_1HND,
                pad(value_1HND, (0, missing)) if missing else value_1HND,
                attention_mask,
                dropout=dropout,
                scaling=scaling,
                **given,
                **kwargs,
            )
        return out[..., : out.shape[-1] - missing] if missing else out, weights
    if dropout:
        raise ValueError(
            f"attention dropout is {dropout}, but a shared prefix cannot draw one mask per branch; "
            "set model.override_config.attention_dropout=0"
        )
    _refuse_own_masks(module, query_1HND, key_1HND, attention_mask, kwargs)
    # Views, not indexing: the backward of indexing would copy the gradient into a new tensor of zeros.
    query_NHD, key_NHD, value_NHD = (t.squeeze(0).transpose(0, 1) for t in (query_1HND, key_1HND, value_1HND))
    if sequence_parallel is not None:
        query_NHD, key_NHD, value_NHD = _exchange_heads(sequence_parallel, query_NHD, key_NHD, value_NHD)
        s_aux = None if s_aux is None else sequence_parallel.own_heads(s_aux)
    past: LayerTensors = {}
    if kv_relay is not None:
        past = kv_relay.past(relay_number(module))
        kv_relay.capture(relay_number(module), keys=key_NHD, values=value_NHD)
    out_NHD = tree_attention(
        query_NHD,
        key_NHD,
        value_NHD,
        tree_layout,
        past_k=past.get(KEYS),
        past_v=past.get(VALUES),
        scale=scaling,
        # Flash attention reads the keyword and gets no mask; the others read the mask.
        window=sliding_window if "flash" in flat_implementation else vars(module)[WINDOW],
        softcap=softcap,
        sinks=s_aux,
        impl=impl,
        deterministic=deterministic,
    )
    assert isinstance(out_NHD, torch.Tensor)
    if sequence_parallel is not None:
        out_NHD = sequence_parallel.tokens_of_heads(out_NHD)
    return out_NHD.unsqueeze(0), None


def _refuse_own_masks(
    module: Any,
    query_1HND: torch.Tensor,
    key_1HND: torch.Tensor,
    attention_mask: torch.Tensor | None,
    given: dict[str, object],
) -> None:
    """Refuse layers with any mask other than causal or sliding, which tree attention would silently ignore.

    Raises:
        UnsupportedModelError: names the layer and the argument.
    """
    is_causal = given.get("is_causal")
    is_causal = getattr(module, "is_causal", True) if is_causal is None else is_causal
    is_skipped = attention_mask is None or (
        attention_mask.shape == SKIP_MASK_SHAPE and attention_mask.dtype == torch.bool
    )
    others = [name for name, value in given.items() if name not in UNRESTRICTING and value is not None]
    reason = None
    if not is_skipped:
        reason = "a mask of its own besides the causal or sliding one"
    elif not is_causal:
        reason = "attention in both directions"
    elif query_1HND.shape[2] != key_1HND.shape[2]:
        reason = f"{key_1HND.shape[2]} keys for {query_1HND.shape[2]} tokens"
    elif WINDOW not in vars(module):
        reason = "a mask that transformers builds for no layer of the model"
    elif others:
        reason = f"{others[0]}, which tree attention does not read"
    if reason is not None:
        raise UnsupportedModelError(
            f"{type(module).__name__} (model_type={module.config.model_type}) cannot train on trees: its attention "
            f"asks for {reason}; train on rows with model_type=language_model (value_model for a critic)"
        )


def _exchange_heads(
    ranks: SequenceParallel, query_nHD: torch.Tensor, key_nHD: torch.Tensor, value_nHD: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Queries, keys and values of all tokens for this rank's heads; few key-value heads are copied to several ranks."""
    heads, key_heads = query_nHD.shape[1], key_nHD.shape[1]
    copies = math.lcm(key_heads, ranks.size) // key_heads
    if heads % (key_heads * copies):
        raise ValueError(
            f"{heads} heads over {key_heads} key-value heads cannot be divided among {ranks.size} ranks; set "
            f"ulysses_sequence_parallel_size to a divisor of {heads} that divides {key_heads} or is a multiple of it"
        )
    if copies > 1:
        key_nHD, value_nHD = (t.repeat_interleave(copies, dim=1) for t in (key_nHD, value_nHD))
    return (
        ranks.heads_of_tokens(query_nHD),
        ranks.heads_of_tokens(key_nHD),
        ranks.heads_of_tokens(value_nHD),
    )


def _flat_attention(module: nn.Module, implementation: str) -> Callable[..., tuple[torch.Tensor, torch.Tensor | None]]:
    if implementation == "eager":
        return sys.modules[type(module).__module__].eager_attention_forward
    return ALL_ATTENTION_FUNCTIONS[implementation]
