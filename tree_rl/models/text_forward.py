"""Lets a multimodal model run text rows on its language model and head only, and rows with images on features.

`logits_rule.py` checks, by running the wrapper's forward with stubs, that the wrapper does nothing else with text.
"""

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import nn
from transformers.modeling_outputs import CausalLMOutputWithPast

from tree_rl.models.images import ImagePatches, ImageTokens, run_tower
from tree_rl.models.language_model import TYPE_IDS, is_wrapper, language_model
from tree_rl.models.logits_rule import LogitsRule, find_logits_rule
from tree_rl.models.own_forwards import restore_own_forwards

OTHER_INPUTS = ("pixel", "image", "video", "audio", "input_features")
"""Parts of the names of inputs that are not text."""


def use_language_model(model: nn.Module) -> None:
    """Let a wrapper run only its language model and head; other models do not change.

    Args:
        model: checked by `check_model`, before FSDP or PEFT wrap it.
    """
    decoder = language_model(model)
    restore_own_forwards(decoder)
    if not is_wrapper(model) or runs_language_model(model):
        return
    # Set on the instance, so that the class and its other models do not change.
    untyped: Any = model
    if untyped.get_output_embeddings() is None:
        # A critic's own forward applies its head to the base model's output.
        vars(untyped.base_model)["forward"] = partial(_read, untyped.base_model, decoder)
        return
    rule = find_logits_rule(untyped)
    rule = LogitsRule(computes=False) if isinstance(rule, str) else rule
    vars(model)["forward"] = partial(_forward, model, decoder, rule.apply)


def runs_language_model(model: nn.Module) -> bool:
    """True if the wrapper was prepared by `use_language_model`."""
    untyped: Any = model
    forwards = [vars(part).get("forward") for part in (model, untyped.base_model)]
    return any(isinstance(forward, partial) and forward.func in (_forward, _read) for forward in forwards)


def _forward(
    model: Any,
    decoder: Any,
    finish: Callable[[Any], Any],
    input_ids: torch.Tensor | None = None,
    attention_mask: Any = None,
    position_ids: torch.Tensor | None = None,
    logits_to_keep: int | torch.Tensor = 0,
    image_patches: ImagePatches | None = None,
    **kwargs: Any,
) -> CausalLMOutputWithPast:
    """Forward of a causal language model, built from the parts of a wrapper."""
    if image_patches is not None:
        return CausalLMOutputWithPast(hidden_states=run_tower(model, image_patches).hidden_states)
    output = _read(model, decoder, input_ids, attention_mask, position_ids, **kwargs)
    kept = slice(-logits_to_keep, None) if isinstance(logits_to_keep, int) else logits_to_keep
    logits = finish(model.get_output_embeddings()(output.last_hidden_state[:, kept]))
    return CausalLMOutputWithPast(logits=logits, past_key_values=output.past_key_values)


def _read(
    model: Any,
    decoder: Any,
    input_ids: torch.Tensor | None = None,
    attention_mask: Any = None,
    position_ids: torch.Tensor | None = None,
    image_patches: ImagePatches | None = None,
    image_tokens: ImageTokens | None = None,
    **kwargs: Any,
) -> Any:
    """Run a wrapper's language model on text and features of images, or its tower on images alone."""
    if image_patches is not None:
        return run_tower(model, image_patches)
    foreign = [
        name for name, value in kwargs.items() if value is not None and any(word in name for word in OTHER_INPUTS)
    ]
    if foreign:
        raise ValueError(f"{type(model).__name__} reads rows of text alone, received {foreign[0]}; drop such rows")
    kwargs = {name: value for name, value in kwargs.items() if name not in TYPE_IDS}
    if image_tokens is not None:
        assert input_ids is not None
        kwargs |= image_tokens.decoder_inputs(decoder, input_ids)
        return decoder(attention_mask=attention_mask, position_ids=position_ids, **kwargs)
    if position_ids is not None and position_ids.ndim == 3:
        # For text all axes are equal, so one axis is enough.
        position_ids = position_ids[0]
    return decoder(input_ids=input_ids, attention_mask=attention_mask, position_ids=position_ids, **kwargs)
