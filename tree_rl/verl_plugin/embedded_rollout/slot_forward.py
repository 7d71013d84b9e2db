"""One forward of a Hugging Face model that extends several slots of the cache by different numbers of tokens.

Padding is on the left: the last column has every row's last token, and the model computes logits only there.
Shapes: R rows, Q new tokens of the longest row, K tokens of context, V vocabulary.
"""

import numpy as np
import torch
from transformers import PretrainedConfig, PreTrainedModel

from tree_rl.verl_plugin.embedded_rollout.slot_cache import SlotCache

FULL, SLIDING = "full_attention", "sliding_attention"


def forward_logits(model: PreTrainedModel, cache: SlotCache, rows: slice, new_ids: list[list[int]]) -> torch.Tensor:
    """Run at least one new token after the content of each of R slots; return the logits [R, V] of the last new token.

    Writes the new tokens' keys and values into the cache; the caller updates its lengths.
    """
    device = next(model.parameters()).device
    longest = max(len(ids) for ids in new_ids)
    count_R1 = np.array([[len(ids)] for ids in new_ids])
    start_R1 = cache.length_S[rows, None]
    offset_RQ = np.arange(longest)[None, :] - (longest - count_R1)
    is_padding_RQ = offset_RQ < 0
    position_RQ = np.where(is_padding_RQ, 0, start_R1 + offset_RQ)
    column_RQ = np.where(is_padding_RQ, cache.capacity_tokens, position_RQ)
    input_RQ = np.array([[0] * (longest - len(ids)) + ids for ids in new_ids])
    context_tokens = int((start_R1 + count_R1).max())

    positions = torch.from_numpy(position_RQ).to(device)
    cache.begin(rows, torch.from_numpy(column_RQ).to(device), context_tokens)
    output = model(
        input_ids=torch.from_numpy(input_RQ).to(device),
        position_ids=positions,
        attention_mask=attention_masks(model.config.get_text_config(), positions, context_tokens),
        past_key_values=cache,
        use_cache=True,
        logits_to_keep=1,
    )
    return output.logits[:, -1]


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
