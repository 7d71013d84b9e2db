"""What one partition's forward reads of its ancestors and leaves for its children (paper, "Differentiable partition
boundaries"): keys and values of attention layers, states and convolution contexts of recurrent ones.

Legend: n tokens of the partition, P tokens of its past, S cuts, H key-value or value heads, D head size, L layers.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch

Pair = tuple[torch.Tensor, torch.Tensor]


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class Captured:
    """What one layer left, with its graph."""

    pair: Pair
    """keys and values [n, H, D] of all tokens, or states [S, H, K, V] and contexts [S, taps - 1, channels]"""
    at_cuts: bool
    """whether the pair holds one entry per cut, as a recurrent layer leaves it"""


class KeyValueRelay:
    """Travels as a keyword through a model's forward; every layer reads its past and leaves here what children read.

    Opaque on purpose: a list or dict handed to an FSDP2 module is copied, and what is written into the copy is lost.
    """

    def __init__(self, past: Sequence[Pair] = (), cuts: tuple[int, ...] = ()) -> None:
        """Take the past of each layer.

        Args:
            past: keys and values [P, H, D], or the state [H, K, V] and the context [taps - 1, channels] at the cut
                that the partition hangs from; none for a partition of roots.
            cuts: tokens of the partition after which children hang; a recurrent layer leaves its state there.
        """
        self.cuts = cuts
        self._past = past
        self._captured: dict[int, Captured | None] = {}

    def past(self, layer: int) -> tuple[torch.Tensor | None, torch.Tensor | None]:
        """Past keys and values of a layer, or its state and context, or (None, None)."""
        return self._past[layer] if self._past else (None, None)

    def capture(self, layer: int, first: torch.Tensor, second: torch.Tensor, *, at_cuts: bool = False) -> None:
        """Keep a layer's keys (rotary positions applied) and values, or its states and contexts, with their graph.

        Gradient checkpointing runs the layer again in the backward: the first pass is the one whose graph counts.
        """
        if layer not in self._captured:
            self._captured[layer] = Captured(pair=(first, second), at_cuts=at_cuts)

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
