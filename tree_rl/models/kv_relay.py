"""Keys and values of one partition's forward: its ancestors' in, its own out (paper, "Differentiable partition
boundaries").

Legend: n tokens of the partition, P tokens of its past, H key-value heads, D head size, L layers.
"""

from collections.abc import Sequence

import torch


class KeyValueRelay:
    """Travels as a keyword through a model's forward; every attention layer reads its past and leaves its keys here.

    Opaque on purpose: a list or dict handed to an FSDP2 module is copied, and what is written into the copy is lost.
    """

    def __init__(self, past: Sequence[tuple[torch.Tensor, torch.Tensor]] = ()) -> None:
        """Take the past keys and values of each layer, [P, H, D]; none for a partition of roots."""
        self._past = past
        self._captured: dict[int, tuple[torch.Tensor, torch.Tensor]] = {}

    def past(self, layer: int) -> tuple[torch.Tensor | None, torch.Tensor | None]:
        """Past keys and values of a layer, or (None, None)."""
        return self._past[layer] if self._past else (None, None)

    def capture(self, layer: int, key_NHD: torch.Tensor, value_NHD: torch.Tensor) -> None:
        """Keep a layer's keys (rotary positions applied) and values, with their graph.

        Gradient checkpointing runs the layer again in the backward: the first pass is the one whose graph counts.
        """
        if layer not in self._captured:
            self._captured[layer] = (key_NHD, value_NHD)

    def take(self) -> list[tuple[torch.Tensor, torch.Tensor]]:
        """The captured (keys, values) [n, H, D] of all layers, in order; the relay forgets them.

        Raises:
            ValueError: a layer without attention of its own; such a model cannot run in partitions.
        """
        layers = sorted(self._captured)
        if layers != list(range(len(layers))) or not layers:
            raise ValueError(f"expected keys and values of layers 0, 1, ..., received those of layers {layers}")
        captured = [self._captured[layer] for layer in layers]
        # A dict that still answers `in` keeps a recomputation from capturing again.
        self._captured = dict.fromkeys(self._captured, (torch.empty(0), torch.empty(0)))
        return captured
