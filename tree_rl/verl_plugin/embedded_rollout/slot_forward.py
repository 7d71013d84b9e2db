"""One forward of a Hugging Face model that extends several slots of the cache by different numbers of tokens.

Padding is on the left: the last column has every row's last token, and the model computes logits only there.
Shapes: R rows, Q new tokens of the longest row, K tokens of context, V vocabulary, p image tokens, S stacked features.
"""

from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from transformers import PretrainedConfig, PreTrainedModel

from tree_rl.models.images import TOKENS, ImageTokens
from tree_rl.verl_plugin.embedded_rollout.slot_cache import SlotCache

FULL, SLIDING = "full_attention", "sliding_attention"


@dataclass(kw_only=True, slots=True)
class NewTokens:
    """The tokens that a forward appends to one slot."""

    ids: list[int]
    """At least one token."""
    keyed_ids: np.ndarray
    """The same with keys of images instead of their tokens, for the cache."""
    position_3Q: np.ndarray | None = None
    """int64 [3, new], rotary positions after an image; None counts the slot's tokens."""
    images: tuple[np.ndarray, torch.Tensor] | None = None
    """int64 [p], distances of image tokens from the end, 1 for the last token, and features [S, p, C]."""


def forward_logits(model: PreTrainedModel, cache: SlotCache, rows: slice, new: list[NewTokens]) -> torch.Tensor:
    """Run at least one new token after the content of each of R slots; return the logits [R, V] of the last new token.

    Writes the new tokens' keys and values into the cache; the caller updates its lengths.
    """
    device = next(model.parameters()).device
    longest = max(len(one.ids) for one in new)
    count_R1 = np.array([[len(one.ids)] for one in new])
    start_R1 = cache.length_S[rows, None]
    offset_RQ = np.arange(longest)[None, :] - (longest - count_R1)
    is_padding_RQ = offset_RQ < 0
    position_RQ = np.where(is_padding_RQ, 0, start_R1 + offset_RQ)
    column_RQ = np.where(is_padding_RQ, cache.capacity_tokens, position_RQ)
    input_RQ = np.array([[0] * (longest - len(one.ids)) + one.ids for one in new])
    context_tokens = int((start_R1 + count_R1).max())

    positions = torch.from_numpy(position_RQ).to(device)
    cache.begin(rows, torch.from_numpy(column_RQ).to(device), context_tokens)
    output = model(
        input_ids=torch.from_numpy(input_RQ).to(device),
        position_ids=_rotary(new, positions),
        attention_mask=attention_masks(model.config.get_text_config(), positions, context_tokens),
        past_key_values=cache,
        use_cache=True,
        logits_to_keep=1,
        **_image_tokens(new, longest, device),
    )
    return output.logits[:, -1]


def _rotary(new: list[NewTokens], positions_RQ: torch.Tensor) -> torch.Tensor:
    """Rotary positions: [3, R, Q] if a row has an image, else the given ones."""
    if all(one.position_3Q is None for one in new):
        return positions_RQ
    rotary_3RQ = positions_RQ.expand(3, -1, -1).clone()
    for row, one in enumerate(new):
        if one.position_3Q is not None:
            rotary_3RQ[:, row, -len(one.ids) :] = torch.from_numpy(one.position_3Q)
    return rotary_3RQ


def _image_tokens(new: list[NewTokens], longest: int, device: torch.device) -> dict[str, Any]:
    """The keyword for image tokens among the new ones; empty without any."""
    found = [(row, one.images) for row, one in enumerate(new) if one.images is not None]
    if not found:
        return {}
    token_p = np.concatenate([(row + 1) * longest - behind_p for row, (behind_p, _) in found])
    features_SpC = torch.cat([features for _, (_, features) in found], dim=1)
    feature_p = torch.arange(len(token_p), device=device)
    token = torch.from_numpy(token_p).to(device)
    return {TOKENS: ImageTokens(features_SMC=features_SpC, token_p=token, feature_p=feature_p)}


def attention_masks(
    config: PretrainedConfig, positions_RQ: torch.Tensor, context_tokens: int
) -> torch.Tensor | dict[str, torch.Tensor]:
    """Build the causal mask for each kind of attention layer of the model.

    Returns:
        [R, 1, Q, K], boolean for SDPA and additive for eager attention; a dict by layer type if layers differ.

    Raises:
        NotImplementedError: the model has layers other than attention.
    """
    layer_types = getattr(config, "layer_types", None)
    window = getattr(config, "sliding_window", None)
    if layer_types is None:
        layer_types = [FULL if window is None else SLIDING]
    unknown = sorted(set(layer_types) - {FULL, SLIDING})
    if unknown:
        raise NotImplementedError(
            f"rollout.name=hf: {config.model_type} has layers of type {unknown[0]!r}, expected {FULL} or {SLIDING}; "
            "use rollout.name=vllm or sglang for this model"
        )
    key_K = torch.arange(context_tokens, device=positions_RQ.device)
    masks = {FULL: key_K <= positions_RQ[:, None, :, None]}
    if SLIDING in layer_types and window is not None:
        masks[SLIDING] = masks[FULL] & (key_K > positions_RQ[:, None, :, None] - window)
    if config._attn_implementation == "eager":
        lowest = torch.finfo(config.dtype or torch.float32).min
        masks = {kind: torch.where(mask, 0.0, lowest).to(config.dtype or torch.float32) for kind, mask in masks.items()}
    kinds = set(layer_types)
    return masks[kinds.pop()] if len(kinds) == 1 else masks
