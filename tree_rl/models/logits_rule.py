"""What a causal language model does to its head's output: found by running its own forward with body and head stubbed.

Legend: R tokens kept, C hidden size, V vocabulary.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from transformers import PreTrainedModel

TOLERANCE = 1e-12


@dataclass(frozen=True, kw_only=True, slots=True)
class LogitsRule:
    """logits = cap(factor * head output), with cap(x) = softcap * tanh(x / softcap); one of the two at most."""

    factor: float = 1.0
    """Factor of the logits (Cohere, Granite)."""
    softcap: float | None = None
    """Cap of the logits (Gemma 2)."""
    computes: bool
    """Whether the model computes with its head's output at all, be it a factor of one."""


def find_logits_rule(model: PreTrainedModel) -> LogitsRule | str:
    """What happens to logits between the head and the model's output, or why that cannot be said.

    The forward runs in float64 on the CPU with known logits in place of the head's; no weight is touched, so meta
    tensors serve as well, and every rank finds the same.

    Args:
        model: causal language model, before any wrapping.
    """
    head = model.get_output_embeddings()
    # Two tokens, the second kept. Logits of either sign from 1/64 to 64: a cap shows at the large ones.
    column_V = torch.arange(head.out_features, dtype=torch.float64)
    known_11V = (((column_V % 2) * 2 - 1) * 2.0 ** (column_V % 13 - 6))[None, None]
    seen: list[tuple[int, ...]] = []
    try:
        with _stubbed(model, head, known_11V, seen), torch.no_grad():
            output = model.forward(
                input_ids=torch.zeros(1, 2, dtype=torch.long),
                position_ids=torch.arange(2)[None],
                use_cache=False,
                logits_to_keep=torch.tensor([1]),
            )
            returned = output.logits
    except (AttributeError, IndexError, KeyError, NotImplementedError, RuntimeError, TypeError, ValueError) as error:
        return f"its forward could not be probed ({type(error).__name__}: {error})"
    if seen != [(1, 1, head.in_features)]:
        return f"its head runs on {seen} where one token was asked for"
    if not isinstance(returned, torch.Tensor) or returned.shape != known_11V.shape:
        return "its forward changes the shape of the head's output"
    if returned.dtype != known_11V.dtype:
        return f"its forward converts the head's output to {returned.dtype}"
    return _rule_from(known_11V, returned, model.config.to_dict())


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


class _BodyOutput:
    """Hidden states, and nothing under any other name."""

    def __init__(self, hidden_12C: torch.Tensor) -> None:
        self.last_hidden_state = hidden_12C

    def __getattr__(self, name: str) -> None:
        return None

    def __getitem__(self, index: int | slice) -> Any:
        return (self.last_hidden_state,)[index]


@contextmanager
def _stubbed(
    model: PreTrainedModel, head: nn.Linear, known_11V: torch.Tensor, seen: list[tuple[int, ...]]
) -> Iterator[None]:
    """The model without its body and head: hidden states of zeros, known logits; notes the shapes the head sees."""

    def body(*_: object, **__: object) -> _BodyOutput:
        return _BodyOutput(torch.zeros(1, 2, head.in_features, dtype=known_11V.dtype))

    def project(hidden: torch.Tensor) -> torch.Tensor:
        seen.append(tuple(hidden.shape))
        return known_11V

    stubs = {model.base_model: body, head: project}
    kept = {module: vars(module).get("forward") for module in stubs}
    for module, forward in stubs.items():
        vars(module)["forward"] = forward
    try:
        yield
    finally:
        for module, forward in kept.items():
            if forward is None:
                del vars(module)["forward"]
            else:
                vars(module)["forward"] = forward
