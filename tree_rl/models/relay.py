"""What one partition's forward reads of its ancestors and leaves for its children (paper, "Differentiable partition
boundaries"): named tensors of each layer, such as the keys and values of attention or the state of a recurrence.

Legend: n tokens of the partition, P tokens of its past, S cuts, H key-value or value heads, D head size, L layers.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass

import torch

KEYS, VALUES = "keys", "values"
STATE, CONTEXT = "state", "context"

LayerTensors = Mapping[str, torch.Tensor]
"""One layer's tensors by name. Attention: `keys`, `values`, one entry per token, rotary positions applied.
Recurrent layers: `state` and the convolution's `context`, or one of the two."""


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class Captured:
    """What one layer left, with its graph."""

    tensors: LayerTensors
    """[n, ...] for all tokens, or [S, ...] for the cuts."""
    at_cuts: bool
    """True if there is one entry per cut, as a recurrent layer leaves it, instead of one per token."""


class LayerRelay:
    """Travels as the keyword `kv_relay` through a model's forward; each layer reads its past and leaves what children
    read.

    It is opaque on purpose: FSDP2 copies a list or dict that it is handed, and loses what is written into the copy.
    """

    def __init__(self, past: Callable[[int], LayerTensors] | None = None, cuts: tuple[int, ...] = ()) -> None:
        """Take the past of each layer.

        Args:
            past: gives a layer's keys and values [P, H, D], or the state [H, K, V] and the context
                [taps - 1, channels] at the cut that the partition hangs from; asked again when a layer is recomputed.
                None for a partition of roots.
            cuts: tokens of the partition after which children hang; a recurrent layer leaves its state there.
        """
        self.cuts = cuts
        self._past = past
        self._captured: dict[int, Captured | None] = {}

    def past(self, layer: int) -> LayerTensors:
        """Past tensors of a layer; empty in a partition of roots."""
        return {} if self._past is None else self._past(layer)

    def capture(self, layer: int, *, at_cuts: bool = False, **tensors: torch.Tensor | None) -> None:
        """Keep a layer's tensors with their graph, if children hang from the partition.

        Gradient checkpointing runs the layer again in the backward: the first pass is the one whose graph counts.

        Raises:
            ValueError: a tensor is missing, because the layer was not asked to return it.
        """
        if layer in self._captured or not self.cuts:
            return
        kept = {name: tensor for name, tensor in tensors.items() if tensor is not None}
        if len(kept) < len(tensors):
            raise ValueError(f"layer {layer}: expected {', '.join(tensors)} for its children, received {list(kept)}")
        self._captured[layer] = Captured(tensors=kept, at_cuts=at_cuts)

    def take(self) -> list[Captured]:
        """What all layers left, in order; the relay forgets it.

        Raises:
            ValueError: a layer left nothing; such a model cannot run in partitions.
        """
        layers = sorted(self._captured)
        if layers != list(range(len(layers))) or not layers:
            raise ValueError(f"expected keys and values (or states) of layers 0, 1, ..., received those of {layers}")
        captured = [one for layer in layers if (one := self._captured[layer]) is not None]
        # A dict that still answers `in` keeps a recomputation from capturing again.
        self._captured = dict.fromkeys(self._captured)
        return captured
