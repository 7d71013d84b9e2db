"""What crosses a cut (the paper's gateway): each layer's tensors down as detached leaves, gradients up in float32.

Attention layers relay the root-to-cut path (paper, appendix "Zero-Overhead Partition Boundaries"; no siblings, so no
bias mask), recurrent layers the state and the convolution's context at the cut, which stand for the whole path.
Legend: r relayed tokens of a partition, P tokens of its past, S cuts, H heads, D head size, L layers.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial

import torch
from torch.autograd.graph import GradientEdge, get_gradient_edge

from tree_kernels.accumulation import accumulation_dtype
from tree_rl.models.relay import Captured, LayerRelay, LayerTensors
from tree_rl.training.cuts.host_store import HostStore
from tree_rl.training.cuts.path_stack import Key, PathStack

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

    like: Tensors
    """Without memory: shape and dtype of its tensors."""
    tensors: Tensors
    """Detached, on the device or in host memory; empty where they lie on the stack already."""
    at_cuts: bool
    """One entry per cut instead of one per relayed token."""
    edges: list[GradientEdge]
    """Where the children's gradients enter the graph, in the order of the tensors. An edge instead of the tensor: the
    tensor's memory is then free to leave the device."""
    sums: Tensors
    """Gradients from children so far, at least float32; empty until the first child reports."""


class CutRelay:
    """Tensors of one live partition, and the gradients that its children send back.

    A child's past of an attention layer is this partition's own past followed by the path to the cut: a prefix of the
    stack. Gradients of a grandparent's keys stay on the stack and do not enter this partition's graph. A child's past
    of a recurrent layer is one state and one context, through which the gradient of a grandparent's passes in the
    graph.
    """

    def __init__(
        self,
        stack: PathStack,
        past: Sequence[Tensors] = (),
        *,
        past_length: int = 0,
        cuts: tuple[int, ...] = (),
        store: HostStore | None = None,
    ) -> None:
        """Open the relay of a partition that is about to run.

        Args:
            stack: keys and values of its past, behind which it writes its own.
            past: per layer, without graph: state and context; empty where the past lies on the stack. No layers for a
                partition of roots.
            past_length: P.
            cuts: tokens of the partition that children hang from.
            store: where what the stack does not hold waits for children; None keeps it on the device.
        """
        for tensors in past:
            for tensor in tensors.values():
                tensor.requires_grad_(torch.is_grad_enabled())
        self._stack = stack
        self._past = list(past)
        self._past_length = past_length
        self._cuts = cuts
        # No method of this object: a cycle would keep the stack until Python's garbage collector runs.
        self.layers = LayerRelay(partial(_past_of, stack, self._past, past_length) if past else None, cuts)
        self._store = store
        self._kept: list[_Kept] = []
        self._cut_on_stack: int | None = None

    def close(self, relayed: torch.Tensor | None) -> None:
        """After the forward: keep what children will read and forget the rest.

        Args:
            relayed: int64 [r], indices in the partition of the tokens on any path to a cut; None without children.
        """
        if relayed is None:
            return
        captured: list[Captured | None] = [*self.layers.take()]
        for number, layer in enumerate(captured):
            assert layer is not None
            gathered = {name: t if layer.at_cuts else t[relayed] for name, t in layer.tensors.items()}
            kept = _Kept(
                like={name: t.detach().to("meta") for name, t in gathered.items()},
                tensors={},
                at_cuts=layer.at_cuts,
                edges=[get_gradient_edge(t) for t in gathered.values()] if torch.is_grad_enabled() else [],
                sums={},
            )
            waiting = {name: t.detach() for name, t in gathered.items()}
            if self._has_one_path and not layer.at_cuts:
                self._stack.write(number, self._past_length, waiting)
            else:
                kept.tensors = {name: self._put_aside(t) for name, t in waiting.items()}
            self._kept.append(kept)
            # Its whole keys and values make room for the next layer's copies.
            captured[number] = layer = None
        self._cut_on_stack = 0 if self._has_one_path else None

    def past_of_child(self, path: CutPath) -> list[Tensors]:
        """Past of a child partition, without graph; that of attention layers is put on the stack.

        Args:
            path: where it hangs.

        Returns:
            Per layer: the state and the context at the cut of recurrent layers, nothing of attention.
        """
        past: list[Tensors] = []
        for number, layer in enumerate(self._kept):
            if layer.at_cuts:
                past.append({name: self._on(path, t)[path.cut].clone() for name, t in layer.tensors.items()})
                continue
            past.append({})
            if path.cut != self._cut_on_stack:
                own = {name: self._on(path, t)[path.tokens] for name, t in layer.tensors.items()}
                self._stack.write(number, self._past_length, own)
        self._cut_on_stack = path.cut
        return past

    def receive(self, gradients: Sequence[Tensors], path: CutPath) -> None:
        """Add what a child sends back for its past; the stack adds up what one path to one cut gets.

        Args:
            gradients: at least float32, of the shapes that `past_of_child` gave.
            path: as given to `past_of_child`.
        """
        for number, (layer, sent) in enumerate(zip(self._kept, gradients, strict=True)):
            if not layer.at_cuts and self._has_one_path:
                continue
            for name, like in layer.like.items():
                total = sent[name] if layer.at_cuts else self._taken((number, name), len(path.tokens))
                if total is None:
                    continue
                if name not in layer.sums:
                    layer.sums[name] = _zeros(like, path.tokens.device)
                # Indices of a path are distinct: plain indexing adds each once, deterministically.
                layer.sums[name][path.cut if layer.at_cuts else path.tokens] += total

    def backward(self, loss: torch.Tensor) -> list[Tensors]:
        """One traversal from the loss and all that was relayed; gradients of keys and values in front of the partition
        join the sums on the stack.

        Args:
            loss: scalar that hangs from the module's output, so that FSDP2 unshards before the layers' backward.

        Returns:
            Gradients for the parent of the states and contexts, at least float32 per layer; empty for a partition of
            roots.
        """
        kept, self._kept = self._kept, []
        roots = [get_gradient_edge(loss), *(edge for layer in kept for edge in layer.edges)]
        gradients = [torch.ones_like(loss)]
        for number, layer in enumerate(kept):
            for name, like in layer.like.items():
                total = layer.sums.pop(name, None)
                if total is None and not layer.at_cuts and self._has_one_path:
                    total = self._taken((number, name), len(like))
                device = loss.device
                gradients.append(torch.zeros_like(like, device=device) if total is None else total.to(like.dtype))
        # What children read is free before the traversal, which needs the memory.
        del kept
        torch.autograd.backward(roots, gradients)
        upward = []
        for tensors in self._past:
            upward.append({name: _as_float(tensor) for name, tensor in tensors.items()})
            for tensor in tensors.values():
                tensor.grad = None
        return upward

    @property
    def _has_one_path(self) -> bool:
        """Whether all that is relayed is one path to one cut: it lies on the stack and nowhere else."""
        return len(self._cuts) == 1

    def _taken(self, key: Key, num_tokens: int) -> torch.Tensor | None:
        """Gradients of the partition's own tokens on the stack, which begin anew."""
        return self._stack.take_gradient(key, self._past_length, self._past_length + num_tokens)

    def _put_aside(self, tensor: torch.Tensor) -> torch.Tensor:
        return tensor if self._store is None else self._store.put(tensor)

    def _on(self, path: CutPath, waiting: torch.Tensor) -> torch.Tensor:
        """A waiting tensor on the device of `path`."""
        return waiting if self._store is None else self._store.get(waiting, path.tokens.device)


def _past_of(stack: PathStack, past: Sequence[Tensors], length: int, layer: int) -> LayerTensors:
    return past[layer] or stack.past(layer, length)


def _zeros(like: torch.Tensor, device: torch.device) -> torch.Tensor:
    return torch.zeros(like.shape, dtype=accumulation_dtype(like.dtype), device=device)


def _as_float(leaf: torch.Tensor) -> torch.Tensor:
    """A leaf's gradient in at least float32; zeros where nothing read it."""
    return _zeros(leaf, leaf.device) if leaf.grad is None else leaf.grad.to(accumulation_dtype(leaf.dtype), copy=True)
