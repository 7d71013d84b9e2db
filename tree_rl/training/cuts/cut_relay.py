"""What crosses a cut (the paper's gateway): each layer's tensors down as detached leaves, gradients up in float32.

Attention layers relay the root-to-cut path (paper, appendix "Zero-Overhead Partition Boundaries"; no siblings, so no
bias mask), recurrent layers the state and the convolution's context at the cut, which stand for the whole path.
Legend: r relayed tokens of a partition, P tokens of its past, S cuts, H heads, D head size, L layers.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch.autograd.graph import GradientEdge, get_gradient_edge

from tree_rl.models.relay import LayerRelay, LayerTensors
from tree_rl.training.cuts.host_store import HostStore

Tensors = dict[str, torch.Tensor]
"""One layer's tensors, or their gradients, by name."""


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class CutPath:
    """Where a child partition hangs."""

    cut: int
    """Index of its cut among the partition's."""
    tokens: torch.Tensor
    """int64, indices among the relayed tokens of the cut token and its ancestors in the partition."""


@dataclass(kw_only=True, slots=True, eq=False)
class _Kept:
    """What one layer of a live partition keeps for its children."""

    tensors: Tensors
    """Detached, on the device or in host memory."""
    at_cuts: bool
    """One entry per cut instead of one per relayed token."""
    edges: list[GradientEdge]
    """Where the children's gradients enter the graph, in the order of the tensors. An edge instead of the tensor: the
    tensor's memory is then free to leave the device."""
    sums: Tensors
    """Gradients from children so far, at least float32; empty until the first child reports."""
    passed: Tensors
    """Gradients of the partition's own past from its children, which pass on to its parent."""


class CutRelay:
    """Tensors of one live partition, and the gradients that its children send back.

    A child's past of an attention layer is this partition's own past followed by the path to the cut. Gradients of a
    grandparent's keys pass through in float32 and do not enter this partition's graph. A child's past of a recurrent
    layer is one state and one context, through which the gradient of a grandparent's passes in the graph.
    """

    def __init__(self, past: Sequence[Tensors], *, cuts: tuple[int, ...] = (), store: HostStore | None = None) -> None:
        """Open the relay of a partition that is about to run.

        Args:
            past: per layer, without graph: keys and values [P, H, D], or state and context; empty for a partition of
                roots.
            cuts: tokens of the partition that children hang from.
            store: where tensors wait for children; None keeps them on the device.
        """
        for tensors in past:
            for tensor in tensors.values():
                tensor.requires_grad_(torch.is_grad_enabled())
        self.past = list(past)
        self.layers = LayerRelay(self.past, cuts)
        self._store = store
        self._evicted_past: list[Tensors] = []
        self._kept: list[_Kept] = []

    def close(self, relayed: torch.Tensor | None) -> None:
        """After the forward: keep what children will read and forget the rest.

        Args:
            relayed: int64 [r], indices in the partition of the tokens on any path to a cut; None without children.
        """
        captured = self.layers.take()
        if relayed is None:
            return
        for layer in captured:
            gathered = {name: t if layer.at_cuts else t[relayed] for name, t in layer.tensors.items()}
            waiting = {name: self._put_aside(t.detach()) for name, t in gathered.items()}
            edges = [get_gradient_edge(t) for t in gathered.values()] if torch.is_grad_enabled() else []
            self._kept.append(_Kept(tensors=waiting, at_cuts=layer.at_cuts, edges=edges, sums={}, passed={}))
        if self._store is not None:
            self._evicted_past = [{name: self._store.evict(t) for name, t in layer.items()} for layer in self.past]

    def past_of_child(self, path: CutPath) -> list[Tensors]:
        """Past of a child partition, without graph.

        Args:
            path: where it hangs.

        Returns:
            Per layer, [P + len(path), H, D] of attention, the state and the context at the cut of recurrent layers.
        """
        past = []
        waiting: Sequence[LayerTensors] = self._evicted_past or self.past
        for number, layer in enumerate(self._kept):
            if layer.at_cuts:
                # Copies: a child may evict its past, which must not take its siblings' along.
                tensors = {name: self._on(path, t)[path.cut].clone() for name, t in layer.tensors.items()}
            else:
                tensors = {name: self._on(path, t)[path.tokens] for name, t in layer.tensors.items()}
                if waiting:
                    old = {name: self._on(path, t.detach()) for name, t in waiting[number].items()}
                    tensors = {name: torch.cat([old[name], t]) for name, t in tensors.items()}
            past.append(tensors)
        return past

    def receive(self, gradients: Sequence[Tensors], path: CutPath) -> None:
        """Add what a child sends back for its past.

        Sums are made when the first child reports, so that on a long path of partitions only one set is alive.

        Args:
            gradients: at least float32, of the shapes that `past_of_child` gave; owned by this relay from now on.
            path: as given to `past_of_child`.
        """
        for number, (layer, sent) in enumerate(zip(self._kept, gradients, strict=True)):
            if not layer.sums:
                layer.sums = {name: _zeros(t, path.tokens.device) for name, t in layer.tensors.items()}
            for name, gradient in sent.items():
                if layer.at_cuts:
                    layer.sums[name][path.cut] += gradient
                    continue
                past_length = len(self.past[number][name]) if self.past else 0
                if name in layer.passed:
                    layer.passed[name] += gradient[:past_length]
                else:
                    layer.passed[name] = gradient[:past_length]
                # Indices of a path are distinct: plain indexing adds each once, deterministically.
                layer.sums[name][path.tokens] += gradient[past_length:]

    def backward(self, loss: torch.Tensor) -> list[Tensors]:
        """One traversal from the loss and all that was relayed.

        Args:
            loss: scalar that hangs from the module's output, so that FSDP2 unshards before the layers' backward.

        Returns:
            Gradients for the parent, at least float32 per layer, of the shapes of its past; empty for a partition of
            roots.
        """
        kept, self._kept = self._kept, []
        roots = [get_gradient_edge(loss), *(edge for layer in kept for edge in layer.edges)]
        sums_of = ((layer.sums[name], tensor.dtype) for layer in kept for name, tensor in layer.tensors.items())
        gradients = [torch.ones_like(loss), *(total.to(dtype) for total, dtype in sums_of)]
        passed = [layer.passed for layer in kept]
        # What children read is free before the traversal, which needs the memory.
        del kept, sums_of
        self._restore_past()
        torch.autograd.backward(roots, gradients)
        upward = []
        for number, tensors in enumerate(self.past):
            sums = {name: _as_float(tensor) for name, tensor in tensors.items()}
            for name, tensor in tensors.items():
                tensor.grad = None
                if passed and name in passed[number]:
                    sums[name] += passed[number].pop(name)
            upward.append(sums)
        return upward

    def _put_aside(self, tensor: torch.Tensor) -> torch.Tensor:
        return tensor if self._store is None else self._store.put(tensor)

    def _on(self, path: CutPath, waiting: torch.Tensor) -> torch.Tensor:
        """A waiting tensor on the device of `path`."""
        return waiting if self._store is None else self._store.get(waiting, path.tokens.device)

    def _restore_past(self) -> None:
        """Checkpointed layers read the past again in the backward."""
        if self._store is not None:
            for tensors, evicted in zip(self.past, self._evicted_past, strict=False):
                for name, host in evicted.items():
                    self._store.restore(tensors[name], host)
            self._evicted_past = []


def _accumulation_dtype(dtype: torch.dtype) -> torch.dtype:
    return torch.promote_types(dtype, torch.float32)


def _zeros(tensor: torch.Tensor, device: torch.device) -> torch.Tensor:
    return torch.zeros(tensor.shape, dtype=_accumulation_dtype(tensor.dtype), device=device)


def _as_float(leaf: torch.Tensor) -> torch.Tensor:
    """A leaf's gradient in at least float32; zeros where nothing read it."""
    return _zeros(leaf, leaf.device) if leaf.grad is None else leaf.grad.to(_accumulation_dtype(leaf.dtype), copy=True)
