"""What crosses a cut: keys and values down as detached leaves, their gradients up in float32.

Only the root-to-cut path is relayed (paper, appendix "Zero-Overhead Partition Boundaries"; no siblings, so no bias
mask). Legend: r relayed tokens of a partition, P tokens of its past, H key-value heads, D head size, L layers.
"""

from collections.abc import Sequence

import torch
from torch.autograd.graph import GradientEdge, get_gradient_edge

from tree_rl.models.kv_relay import KeyValueRelay
from tree_rl.training.host_store import HostStore

KeyValue = tuple[torch.Tensor, torch.Tensor]


class Gateway:
    """Keys and values of one live partition, and the gradients that its children send back.

    The past of a child is this partition's own past followed by the path to the cut. Gradients of a grandparent's
    keys pass through in float32 without entering this partition's graph.
    """

    def __init__(self, past: Sequence[KeyValue], *, store: HostStore | None = None) -> None:
        """Open the gateway of a partition that is about to run.

        Args:
            past: keys and values [P, H, D] of every layer, without graph; empty for a partition of roots.
            store: where keys and values wait for children; None keeps them on the device.
        """
        for pair in past:
            for tensor in pair:
                tensor.requires_grad_(torch.is_grad_enabled())
        self.past = list(past)
        self.relay = KeyValueRelay(self.past)
        self._store = store
        self._evicted_past: list[KeyValue] = []
        self._kept: list[KeyValue] = []
        self._edges: list[list[GradientEdge]] = []
        self._kept_gradient: list[list[torch.Tensor]] = []
        self._past_gradient: list[list[torch.Tensor]] = []

    def close(self, relayed: torch.Tensor | None) -> None:
        """After the forward: keep the keys and values that children will read; the relay forgets the others.

        Args:
            relayed: int64 [r], indices in the partition of the tokens on any path to a cut; None without children.
        """
        captured = self.relay.take()
        if relayed is None:
            return
        for pair in captured:
            gathered = [tensor[relayed] for tensor in pair]
            key, value = (tensor.detach() for tensor in gathered)
            self._kept.append((key, value) if self._store is None else (self._store.put(key), self._store.put(value)))
            if torch.is_grad_enabled():
                # An edge instead of the tensor: its memory is then free to leave the device.
                self._edges.append([get_gradient_edge(tensor) for tensor in gathered])
        if self._store is not None:
            self._evicted_past = [(self._store.evict(key), self._store.evict(value)) for key, value in self.past]

    def past_of_child(self, path: torch.Tensor) -> list[KeyValue]:
        """Past of a child partition: [P + len(path), H, D] per layer, without graph.

        Args:
            path: int64, indices among the relayed tokens of the cut token and its ancestors here.
        """
        own = [(self._on(path, key)[path], self._on(path, value)[path]) for key, value in self._kept]
        if not self.past:
            return own
        waiting = self._evicted_past or self.past
        return [
            (
                torch.cat([self._on(path, old_key.detach()), key]),
                torch.cat([self._on(path, old_value.detach()), value]),
            )
            for (old_key, old_value), (key, value) in zip(waiting, own, strict=True)
        ]

    def receive(self, gradients: Sequence[Sequence[torch.Tensor]], path: torch.Tensor) -> None:
        """Add what a child sends back for its past: the part of our own past, then the path.

        Sums are made when the first child reports, so that on a long path of partitions only one set is alive.

        Args:
            gradients: float32 [P + len(path), H, D] per layer, for keys and values; owned by this gateway from now on.
            path: as given to `past_of_child`.
        """
        past_length = len(self.past[0][0]) if self.past else 0
        if not self._kept_gradient:
            self._kept_gradient = [[_zeros(tensor, path.device) for tensor in pair] for pair in self._kept]
        if past_length and not self._past_gradient:
            self._past_gradient = [[gradient[:past_length] for gradient in pair] for pair in gradients]
        elif past_length:
            for pair, sums in zip(gradients, self._past_gradient, strict=True):
                for gradient, total in zip(pair, sums, strict=True):
                    total += gradient[:past_length]
        for pair, sums in zip(gradients, self._kept_gradient, strict=True):
            for gradient, total in zip(pair, sums, strict=True):
                # Indices of a path are distinct: plain indexing adds each once, deterministically.
                total[path] += gradient[past_length:]

    def backward(self, loss: torch.Tensor) -> list[list[torch.Tensor]]:
        """One traversal from the loss and the relayed keys and values; returns the gradients for the parent.

        Args:
            loss: scalar that hangs from the module's output, so that FSDP2 unshards before the layers' backward.

        Returns:
            float32 [P, H, D] per layer, for keys and values; empty for a partition of roots.
        """
        roots = [get_gradient_edge(loss)]
        gradients = [torch.ones_like(loss)]
        for layer, edges in enumerate(self._edges):
            for kind, edge in enumerate(edges):
                roots.append(edge)
                gradients.append(self._kept_gradient[layer][kind].to(self._kept[layer][kind].dtype))
        self._kept, self._kept_gradient = [], []
        self._restore_past()
        torch.autograd.backward(roots, gradients)
        self._edges = []
        upward = []
        for layer, pair in enumerate(self.past):
            sums = [_as_float(tensor) for tensor in pair]
            for tensor in pair:
                tensor.grad = None
            if self._past_gradient:
                for total, passed in zip(sums, self._past_gradient[layer], strict=True):
                    total += passed
                self._past_gradient[layer] = []
            upward.append(sums)
        return upward

    def _on(self, path: torch.Tensor, waiting: torch.Tensor) -> torch.Tensor:
        """A waiting tensor on the device of `path`."""
        return waiting if self._store is None else self._store.get(waiting, path.device)

    def _restore_past(self) -> None:
        """Checkpointed layers read the past again in the backward."""
        if self._store is not None:
            for pair, evicted in zip(self.past, self._evicted_past, strict=False):
                for tensor, host in zip(pair, evicted, strict=True):
                    self._store.restore(tensor, host)
            self._evicted_past = []


def _accumulation_dtype(dtype: torch.dtype) -> torch.dtype:
    return torch.promote_types(dtype, torch.float32)


def _zeros(tensor: torch.Tensor, device: torch.device) -> torch.Tensor:
    return torch.zeros(tensor.shape, dtype=_accumulation_dtype(tensor.dtype), device=device)


def _as_float(leaf: torch.Tensor) -> torch.Tensor:
    """A leaf's gradient in at least float32; zeros where nothing read it."""
    return _zeros(leaf, leaf.device) if leaf.grad is None else leaf.grad.to(_accumulation_dtype(leaf.dtype), copy=True)
