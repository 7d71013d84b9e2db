"""What crosses a cut: keys, values and states down as detached leaves, their gradients up in float32.

Attention layers relay the root-to-cut path (paper, appendix "Zero-Overhead Partition Boundaries"; no siblings, so no
bias mask), recurrent layers the state and the convolution's context at the cut, which stand for the whole path.
Legend: r relayed tokens of a partition, P tokens of its past, S cuts, H heads, D head size, L layers.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch.autograd.graph import GradientEdge, get_gradient_edge

from tree_rl.models.relay import KeyValueRelay, Pair
from tree_rl.training.host_store import HostStore


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class CutPath:
    """Where a child partition hangs."""

    cut: int
    """index of its cut among the partition's"""
    tokens: torch.Tensor
    """int64, indices among the relayed tokens of the cut token and its ancestors in the partition"""


class Gateway:
    """Keys, values and states of one live partition, and the gradients that its children send back.

    A child's past of an attention layer is this partition's own past followed by the path to the cut; gradients of a
    grandparent's keys pass through in float32 without entering this partition's graph. A child's past of a recurrent
    layer is one state and one context; through them the gradient of a grandparent's passes in the graph.
    """

    def __init__(self, past: Sequence[Pair], *, cuts: tuple[int, ...] = (), store: HostStore | None = None) -> None:
        """Open the gateway of a partition that is about to run.

        Args:
            past: of every layer, without graph, keys and values [P, H, D] or state and context; empty for a partition
                of roots.
            cuts: tokens of the partition that children hang from.
            store: where keys, values and states wait for children; None keeps them on the device.
        """
        for pair in past:
            for tensor in pair:
                tensor.requires_grad_(torch.is_grad_enabled())
        self.past = list(past)
        self.relay = KeyValueRelay(self.past, cuts)
        self._store = store
        self._evicted_past: list[Pair] = []
        self._kept: list[Pair] = []
        self._at_cuts: list[bool] = []
        self._edges: list[list[GradientEdge]] = []
        self._kept_gradient: list[list[torch.Tensor]] = []
        self._past_gradient: list[list[torch.Tensor]] = []

    def close(self, relayed: torch.Tensor | None) -> None:
        """After the forward: keep what children will read; the relay forgets the rest.

        Args:
            relayed: int64 [r], indices in the partition of the tokens on any path to a cut; None without children.
        """
        captured = self.relay.take()
        if relayed is None:
            return
        for layer in captured:
            gathered = [tensor if layer.at_cuts else tensor[relayed] for tensor in layer.pair]
            first, second = (tensor.detach() for tensor in gathered)
            self._kept.append(
                (first, second) if self._store is None else (self._store.put(first), self._store.put(second))
            )
            self._at_cuts.append(layer.at_cuts)
            if torch.is_grad_enabled():
                # An edge instead of the tensor: its memory is then free to leave the device.
                self._edges.append([get_gradient_edge(tensor) for tensor in gathered])
        if self._store is not None:
            self._evicted_past = [(self._store.evict(first), self._store.evict(second)) for first, second in self.past]

    def past_of_child(self, path: CutPath) -> list[Pair]:
        """Past of a child partition, without graph: [P + len(path), H, D] of attention layers, the state and the
        context at the cut of recurrent ones.

        Args:
            path: where it hangs.
        """
        past = []
        waiting = self._evicted_past or self.past
        for layer, (pair, at_cuts) in enumerate(zip(self._kept, self._at_cuts, strict=True)):
            if at_cuts:
                # Copies: a child may evict its past, which must not take its siblings' along.
                first, second = (self._on(path, tensor)[path.cut].clone() for tensor in pair)
            else:
                first, second = (self._on(path, tensor)[path.tokens] for tensor in pair)
                if waiting:
                    old_first, old_second = (self._on(path, tensor.detach()) for tensor in waiting[layer])
                    first, second = torch.cat([old_first, first]), torch.cat([old_second, second])
            past.append((first, second))
        return past

    def receive(self, gradients: Sequence[Sequence[torch.Tensor]], path: CutPath) -> None:
        """Add what a child sends back for its past.

        Sums are made when the first child reports, so that on a long path of partitions only one set is alive.

        Args:
            gradients: float32, of the shapes that `past_of_child` gave; owned by this gateway from now on.
            path: as given to `past_of_child`.
        """
        if not self._kept_gradient:
            self._kept_gradient = [[_zeros(tensor, path.tokens.device) for tensor in pair] for pair in self._kept]
            self._past_gradient = [[] for _ in self._kept]
        for layer, pair in enumerate(gradients):
            sums = self._kept_gradient[layer]
            if self._at_cuts[layer]:
                for gradient, total in zip(pair, sums, strict=True):
                    total[path.cut] += gradient
                continue
            past_length = len(self.past[layer][0]) if self.past else 0
            if not self._past_gradient[layer]:
                self._past_gradient[layer] = [gradient[:past_length] for gradient in pair]
            else:
                for gradient, total in zip(pair, self._past_gradient[layer], strict=True):
                    total += gradient[:past_length]
            for gradient, total in zip(pair, sums, strict=True):
                # Indices of a path are distinct: plain indexing adds each once, deterministically.
                total[path.tokens] += gradient[past_length:]

    def backward(self, loss: torch.Tensor) -> list[list[torch.Tensor]]:
        """One traversal from the loss and all that was relayed; returns the gradients for the parent.

        Args:
            loss: scalar that hangs from the module's output, so that FSDP2 unshards before the layers' backward.

        Returns:
            float32 per layer, of the shapes of its past; empty for a partition of roots.
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
            if self._past_gradient and self._past_gradient[layer]:
                for total, passed in zip(sums, self._past_gradient[layer], strict=True):
                    total += passed
                self._past_gradient[layer] = []
            upward.append(sums)
        return upward

    def _on(self, path: CutPath, waiting: torch.Tensor) -> torch.Tensor:
        """A waiting tensor on the device of `path`."""
        return waiting if self._store is None else self._store.get(waiting, path.tokens.device)

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
