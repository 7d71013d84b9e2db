"""Finds what a causal language model does to its head's output, by running its forward with body and head stubbed.

Legend: C hidden size, V vocabulary.
"""

import inspect
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from types import MethodType
from typing import Any

import torch
from torch import nn
from transformers import PreTrainedModel
from transformers.modeling_outputs import BaseModelOutputWithPast

from tree_rl.models.language_model import TYPE_IDS, is_wrapper, language_model
from tree_rl.models.own_forwards import own_forward
from tree_rl.models.stubs import attention_named, stubbed

TOLERANCE = 1e-12
EXACT = torch.float64
NOT_PROBED = "its forward could not be probed"


@dataclass(frozen=True, kw_only=True, slots=True)
class LogitsRule:
    """logits = factor * x, or softcap * tanh(x / softcap), where x is the head's output."""

    factor: float = 1.0
    """Factor of the logits (Cohere, Granite)."""
    softcap: float | None = None
    """Cap of the logits (Gemma 2)."""
    computes: bool
    """True if the model operates on its head's output at all, even with a factor of 1 or a cast to float32."""

    def apply(self, logits: Any) -> Any:
        """Apply the rule with the same operations as the model."""
        if not self.computes:
            return logits
        return logits * self.factor if self.softcap is None else torch.tanh(logits / self.softcap) * self.softcap


def find_logits_rule(model: PreTrainedModel) -> LogitsRule | str:
    """The rule between the head's output and the model's logits, or the reason why it cannot be determined.

    The forward runs in float64 on the CPU, with known logits in place of the head's. It reads no weights, so it works
    on meta tensors, and every rank finds the same rule.

    Args:
        model: causal language model, before any wrapping.
    """
    width = model.get_output_embeddings().in_features
    around_body: dict[nn.Module, Callable[..., Any]] = {model.base_model: partial(_body, width)}
    if not is_wrapper(model):
        return _probe(model, around_body)
    found = _probe(model, _stubs_of_wrapper(model, width))
    if isinstance(found, str) and found.startswith(NOT_PROBED) and any(p.is_meta for p in model.parameters()):
        # Some wrappers read weights, which are meta on this rank. The rank that has them runs the full check above.
        return _probe(model, {model: MethodType(own_forward(type(model)), model), **around_body})
    return found


def _probe(model: PreTrainedModel, stubs: dict[nn.Module, Callable[..., Any]]) -> LogitsRule | str:
    head = model.get_output_embeddings()
    # Two tokens, of which the second is kept. Logits of both signs from 1/64 to 64, because a cap shows at large ones.
    column_V = torch.arange(head.out_features, dtype=EXACT)
    known_V = ((column_V % 2) * 2 - 1) * 2.0 ** (column_V % 13 - 6)
    # Every second of twice as many, so that `contiguous()` (OPT) returns another tensor and shows as an operation.
    known_11V = known_V.repeat_interleave(2)[None, None, ::2]
    seen: list[tuple[int, ...]] = []
    accepted = inspect.signature(own_forward(type(model))).parameters if is_wrapper(model) else ()
    # Processors pass zeros for text; some models let tokens of other types look ahead.
    type_ids = {name: torch.zeros(1, 2, dtype=torch.long) for name in TYPE_IDS if name in accepted}
    stubs = {**stubs, head: partial(_project, known_11V, seen)}
    try:
        # Eager attention has its masks built as tensors; other implementations may have none.
        eager = attention_named("eager", model.config, model.config.get_text_config())
        with stubbed(stubs), eager, torch.no_grad():
            output = model.forward(
                input_ids=torch.zeros(1, 2, dtype=torch.long),
                position_ids=torch.arange(2)[None],
                use_cache=False,
                logits_to_keep=torch.tensor([1]),
                **type_ids,
            )
            returned = output.logits
    except _OtherTextError as error:
        return str(error)
    except (AttributeError, IndexError, KeyError, NotImplementedError, RuntimeError, TypeError, ValueError) as error:
        return f"{NOT_PROBED} ({type(error).__name__}: {error})"
    if seen != [(1, 1, head.in_features)]:
        return f"its head runs on {seen} where one token was asked for"
    if not isinstance(returned, torch.Tensor) or returned.shape != known_11V.shape:
        return "its forward changes the shape of the head's output"
    if returned.dtype == torch.float32 and not is_wrapper(model):
        # The known logits are powers of two, which float32 holds exactly.
        returned = returned.to(EXACT)
    if returned.dtype != known_11V.dtype:
        return f"its forward converts the head's output to {returned.dtype}"
    return _rule_from(known_11V, returned, model.config.get_text_config().to_dict())


def _rule_from(known: torch.Tensor, returned: torch.Tensor, settings: dict[str, Any]) -> LogitsRule | str:
    if returned is known:
        return LogitsRule(computes=False)
    factor = float(returned.flatten()[0] / known.flatten()[0])
    if factor > 0 and torch.allclose(returned, factor * known, rtol=TOLERANCE, atol=0):
        return LogitsRule(factor=factor, computes=True)
    softcap = settings.get("final_logit_softcapping")
    if softcap and torch.allclose(returned, softcap * torch.tanh(known / softcap), rtol=TOLERANCE, atol=0):
        return LogitsRule(softcap=float(softcap), computes=True)
    return "its forward changes the head's output by more than a factor or a soft cap"


@dataclass
class _TextOutput(BaseModelOutputWithPast):
    """Output with hidden states; any other attribute is None."""

    def __getattr__(self, name: str) -> None:
        if name.startswith("__"):
            raise AttributeError(name)


def _body(width: int, *_: object, **__: object) -> _TextOutput:
    return _TextOutput(last_hidden_state=torch.zeros(1, 2, width, dtype=EXACT))


def _project(known_11V: torch.Tensor, seen: list[tuple[int, ...]], hidden: torch.Tensor) -> torch.Tensor:
    seen.append(tuple(hidden.shape))
    return known_11V


class _OtherTextError(Exception):
    """A wrapper passes its language model something other than the text."""


def _stubs_of_wrapper(model: PreTrainedModel, width: int) -> dict[nn.Module, Callable[..., Any]]:
    """Stubs that run the wrapper's own forward around a language model that checks its inputs."""
    decoder = language_model(model)
    embedded_12C = torch.linspace(-1, 1, 2 * width, dtype=EXACT).view(1, 2, width)
    embedding: Any = model.get_input_embeddings()

    def embed(*_: object, **__: object) -> torch.Tensor:
        return embedded_12C

    def read(*_: object, **given: Any) -> BaseModelOutputWithPast:
        _check_text(given, embedded_12C)
        return _TextOutput(last_hidden_state=torch.zeros_like(embedded_12C))

    outside = [m for m in model.modules() if m is not decoder and any(part is decoder for part in m.modules())]
    own = {m: MethodType(own_forward(type(m)), m) for m in outside if not isinstance(m, nn.ModuleList)}
    return {**own, embedding: embed, decoder: read}


def _check_text(given: dict[str, Any], embedded_12C: torch.Tensor) -> None:
    """Check that the language model gets the two tokens unchanged, at positions 0 and 1, with a causal mask."""
    embedded, positions = given.pop("inputs_embeds", None), given.pop("position_ids", None)
    if embedded is not None and not torch.equal(embedded.to(embedded_12C.dtype), embedded_12C):
        raise _OtherTextError("it changes embeddings of text before its language model reads them")
    if positions is None or not (positions == torch.arange(2)).all():
        raise _OtherTextError("it gives its language model other positions than it was given")
    masks = given.pop("attention_mask", None)
    for mask in masks.values() if isinstance(masks, dict) else (masks,):
        if mask is not None and mask.ndim == 4 and not _is_causal(mask):
            raise _OtherTextError("tokens of a text see tokens behind them (its mask is not causal)")
    # A wrapper may pass what the language model would compute from the tokens itself, and what only its head reads.
    known = ("input_ids", "past_key_values", "cache_position", "per_layer_inputs", "logits_to_keep")
    others = [name for name, value in given.items() if isinstance(value, torch.Tensor) and name not in known]
    if others:
        raise _OtherTextError(f"it gives its language model {others[0]}, which rows of text do not have")


def _is_causal(mask_11QK: torch.Tensor) -> bool:
    visible_QK = mask_11QK[0, 0] if mask_11QK.dtype == torch.bool else mask_11QK[0, 0] >= 0
    return not bool(visible_QK[0, 1]) and bool(visible_QK.diagonal().all())
