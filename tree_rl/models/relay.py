"""Tensors that a partition's forward reads from its ancestors and leaves for its children (paper, "Differentiable
partition boundaries"): by layer, the keys and values of attention or the state of a recurrence.

Legend: n tokens of the partition, P tokens of its past, S cuts, H key-value or value heads, D head size, L layers.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

KEYS, VALUES = "keys", "values"
STATE, CONTEXT = "state", "context"

LayerTensors = Mapping[str, torch.Tensor]
"""One layer's tensors by name. Attention: `keys`, `values`, one entry per token, rotary positions applied.
Recurrent layers: `state` and the convolution's `context`, or one of the two."""

_NUMBER = "tree_rl_relay_number"
_REMEDY = "this model cannot run in partitions; raise tree.max_tokens above the largest group"


def number_relays(modules: Sequence[Any]) -> None:
    """Number the modules that relay tensors, in order, if their own `layer_idx` does not: layers without state leave
    gaps (Nemotron-H), layers with two such modules use a number twice (Falcon-H1, Zamba 2)."""
    if sorted(module.layer_idx for module in modules) != list(range(len(modules))):
        for number, module in enumerate(modules):
            setattr(module, _NUMBER, number)


def relay_number(module: Any) -> int:
    """The number under which a module relays its tensors: its `layer_idx`, unless `number_relays` gave another."""
    number: int = vars(module).get(_NUMBER, module.layer_idx)
    return number


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class Captured:
    """Tensors that one layer left for child partitions, with their graph."""

    tensors: LayerTensors
    """[n, ...] for all tokens, or [S, ...] for the cuts."""
    at_cuts: bool
    """True if there is one entry per cut (recurrent layers), False if one per token (attention)."""


class LayerRelay:
    """The argument `kv_relay` of a model's forward: every layer reads its past and leaves tensors for child partitions.

    Not a list or dict on purpose: FSDP2 copies those, and what is written into the copy is lost.
    """

    def __init__(self, past: Callable[[int], LayerTensors] | None, cuts: tuple[int, ...]) -> None:
        """Create the relay of one forward.

        Args:
            past: returns a layer's keys and values [P, H, D], or its state [H, K, V] and context
                [taps - 1, channels] at the cut above the partition; called again when a layer is recomputed. None for
                a partition of roots.
            cuts: tokens of the partition below which children start; recurrent layers leave their states there.
        """
        self.cuts = cuts
        self._past = past
        self._captured: dict[int, Captured] = {}
        self._is_taken = False
        self.has_graph = True
        """False if a layer ran without a graph."""

    def past(self, layer: int) -> LayerTensors:
        """Past tensors of a layer; empty for a partition of roots."""
        return {} if self._past is None else self._past(layer)

    def capture(self, layer: int, *, at_cuts: bool = False, **tensors: torch.Tensor | None) -> None:
        """Keep a layer's tensors with their graph, if the partition has children.

        After `take`, calls do nothing: gradient checkpointing runs the layer again in the backward.

        Raises:
            ValueError: a tensor is None, because the layer was not asked to return it; or the forward runs the layer
                twice.
        """
        if not self.cuts or self._is_taken:
            return
        if layer in self._captured:
            raise ValueError(
                f"layer {layer} runs more than once in a forward, so children would read tensors of its first run: "
                f"{_REMEDY}"
            )
        kept = {name: tensor for name, tensor in tensors.items() if tensor is not None}
        if len(kept) < len(tensors):
            raise ValueError(f"layer {layer}: expected {', '.join(tensors)} for its children, received {list(kept)}")
        self.has_graph &= torch.is_grad_enabled()
        self._captured[layer] = Captured(tensors=kept, at_cuts=at_cuts)

    def take(self) -> list[Captured]:
        """Take the tensors of all layers, in order, out of the relay.

        Raises:
            ValueError: a layer left nothing; such a model cannot run in partitions.
        """
        layers = sorted(self._captured)
        if layers != list(range(len(layers))) or not layers:
            raise ValueError(f"expected keys and values (or states) of layers 0, 1, ..., received {layers}: {_REMEDY}")
        captured = [self._captured[layer] for layer in layers]
        self._captured, self._is_taken = {}, True
        return captured
