"""What crosses a cut: keys and values down as detached leaves, their gradients up in float32.

Only the root-to-cut path is relayed (paper, appendix "Zero-Overhead Partition Boundaries"; no siblings, so no bias
mask). Legend: n tokens of a partition, P tokens of its past, H key-value heads, D head size, L layers.
"""

from collections.abc import Sequence
from typing import Self

import torch

from tree_rl.models.kv_relay import KeyValueRelay

KeyValue = tuple[torch.Tensor, torch.Tensor]


class Gateway:
    """Keys and values of one live partition, and the gradients that its children send back.

    The past of a child is this partition's own past followed by the path to the cut. Gradients of a grandparent's
    keys pass through in float32 without entering this partition's graph.
    """

    def __init__(self, past: Sequence[KeyValue]) -> None:
        """Take the past of every layer, [P, H, D] without graph; empty for a partition of roots."""
        for key, value in past:
            key.requires_grad_(torch.is_grad_enabled())
            value.requires_grad_(torch.is_grad_enabled())
        self.past = list(past)
        self.relay = KeyValueRelay(self.past)
        self._local: list[KeyValue] = []
        self._local_gradient: list[list[torch.Tensor]] = []
        self._past_gradient: list[list[torch.Tensor]] = []

    def close(self, *, has_children: bool) -> Self:
        """After the forward: keep the keys and values if a child will read them."""
        captured = self.relay.take()
        if has_children:
            self._local = captured
            if torch.is_grad_enabled():
                self._local_gradient = [[_zeros(tensor) for tensor in layer] for layer in captured]
                self._past_gradient = [[_zeros(tensor) for tensor in layer] for layer in self.past]
        return self

    def past_of_child(self, path: torch.Tensor) -> list[KeyValue]:
        """Past of a child partition: [P + len(path), H, D] per layer, detached.

        Args:
            path: int64, indices in this partition of the cut token and its ancestors here.
        """
        own = [(key.detach()[path], value.detach()[path]) for key, value in self._local]
        if not self.past:
            return own
        return [
            (torch.cat([old_key.detach(), key]), torch.cat([old_value.detach(), value]))
            for (old_key, old_value), (key, value) in zip(self.past, own, strict=True)
        ]

    def receive(self, gradients: Sequence[Sequence[torch.Tensor]], path: torch.Tensor) -> None:
        """Add what a child sends back for its past: the part of our own past, then the path.

        Args:
            gradients: float32 [P + len(path), H, D] per layer, for keys and values.
            path: as given to `past_of_child`.
        """
        past_length = len(self.past[0][0]) if self.past else 0
        for layer, pair in enumerate(gradients):
            for kind, gradient in enumerate(pair):
                if past_length:
                    self._past_gradient[layer][kind] += gradient[:past_length]
                # Indices of a path are distinct: plain indexing adds each once, deterministically.
                self._local_gradient[layer][kind][path] += gradient[past_length:]

    def backward(self, loss: torch.Tensor) -> list[list[torch.Tensor]]:
        """One traversal from the loss and the relayed keys and values; returns the gradients for the parent.

        Args:
            loss: scalar that hangs from the module's output, so that FSDP2 unshards before the layers' backward.

        Returns:
            float32 [P, H, D] per layer, for keys and values; empty for a partition of roots.
        """
        roots: list[torch.Tensor] = [loss]
        gradients: list[torch.Tensor | None] = [None]
        for layer, pair in enumerate(self._local):
            for kind, tensor in enumerate(pair):
                roots.append(tensor)
                gradients.append(self._local_gradient[layer][kind].to(tensor.dtype))
        torch.autograd.backward(roots, gradients)
        self._local = []
        upward = []
        for layer, pair in enumerate(self.past):
            sums = [_as_float(tensor) for tensor in pair]
            if self._past_gradient:
                sums = [own + passed for own, passed in zip(sums, self._past_gradient[layer], strict=True)]
            upward.append(sums)
        return upward


def _accumulation_dtype(dtype: torch.dtype) -> torch.dtype:
    return torch.promote_types(dtype, torch.float32)


def _zeros(tensor: torch.Tensor) -> torch.Tensor:
    return torch.zeros_like(tensor, dtype=_accumulation_dtype(tensor.dtype), requires_grad=False)


def _as_float(leaf: torch.Tensor) -> torch.Tensor:
    """A leaf's gradient in at least float32; zeros where nothing read it."""
    return _zeros(leaf) if leaf.grad is None else leaf.grad.to(_accumulation_dtype(leaf.dtype))
