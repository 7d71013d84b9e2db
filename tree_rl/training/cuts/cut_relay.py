"""What crosses a cut (the paper's gateway): each layer's tensors down as detached leaves, gradients up in float32.

Attention layers relay keys and values of the root-to-cut path (paper, appendix "Zero-Overhead Partition Boundaries";
no siblings, so no bias mask). Recurrent layers relay the state and the convolution's context at the cut.
Legend: r relayed tokens of a partition, P tokens of its past, S cuts, H heads, D head size, L layers.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial

import numpy as np
import torch
from torch.autograd.graph import GradientEdge, get_gradient_edge

from tree_kernels.accumulation import accumulation_dtype
from tree_kernels.host_copy import to_device
from tree_rl.models.relay import Captured, LayerRelay, LayerTensors
from tree_rl.training.cuts.path_stack import Key, PathStack
from tree_rl.tree.partition import Partition

Tensors = dict[str, torch.Tensor]
"""One layer's tensors, or their gradients, by name."""


@dataclass(kw_only=True, slots=True, eq=False)
class _Kept:
    """What one layer of a live partition keeps for its children."""

    like: Tensors
    """Meta tensors: shapes and dtypes of the relayed tensors."""
    tensors: Tensors
    """Detached tensors, on the device or in host memory; empty if they are on the stack already."""
    at_cuts: bool
    """True if the tensors have one entry per cut instead of one per relayed token."""
    edges: dict[str, GradientEdge]
    """Where the children's gradients enter the graph, by name; none for tensors without graph, whose layers are frozen.
    An edge, unlike the tensor, does not keep device memory alive."""
    sums: Tensors
    """Sum of the children's gradients so far, at least float32; empty before the first child's backward."""


class CutRelay:
    """Tensors of one live partition, and the gradients that its children send back.

    In an attention layer, a child's past is this partition's past followed by the path to the cut: a prefix of the
    stack. Gradients of a grandparent's keys are summed on the stack and do not enter this partition's graph. In a
    recurrent layer, the past is one state and one context; their gradients flow through this partition's graph.
    """

    def __init__(self, stack: PathStack, past: Sequence[Tensors], partition: Partition) -> None:
        """Open the relay of a partition that is about to run.

        Args:
            stack: keys and values of its past; the partition appends those of its path to a single cut. With a stack on
                the host, other tensors that wait for children are there too, and the compute stream copies them.
            past: state and context of each layer, without graph; an empty dictionary for a layer whose past is on the
                stack. No layers at all for a partition of roots.
            partition: its past and cuts.
        """
        for tensors in past:
            for tensor in tensors.values():
                tensor.requires_grad_(torch.is_grad_enabled())
        self._stack = stack
        self._past = list(past)
        self._past_length = partition.past_length
        self._cuts = partition.cuts
        self._relayed = partition.relayed_tokens
        # Not a bound method: a reference cycle would keep the stack alive until Python's garbage collector runs.
        past_of = partial(_past_of, stack, self._past, partition.past_length) if past else None
        self.layers = LayerRelay(past_of, tuple(cut.local_token for cut in partition.cuts))
        self._kept: list[_Kept] = []
        self._cut_on_stack: int | None = None

    def close(self) -> None:
        """After the forward: keep what children will read and free the rest.

        Raises:
            ValueError: layers of an update ran without a graph, so that gradients of the children would be lost.
        """
        if not self._cuts:
            return
        if torch.is_grad_enabled() and not self.layers.has_graph:
            raise ValueError(
                "layers ran without a graph in a forward that trains, as under reentrant gradient checkpointing: set "
                "use_reentrant=False, or raise tree.max_tokens above the largest group"
            )
        relayed = to_device(self._relayed.astype(np.int64), self._stack.device)
        captured: list[Captured | None] = [*self.layers.take()]
        for number, layer in enumerate(captured):
            assert layer is not None
            gathered = {name: t if layer.at_cuts else t[relayed] for name, t in layer.tensors.items()}
            kept = _Kept(
                like={name: t.detach().to("meta") for name, t in gathered.items()},
                tensors={},
                at_cuts=layer.at_cuts,
                edges={name: get_gradient_edge(t) for name, t in gathered.items() if t.requires_grad},
                sums={},
            )
            waiting = {name: t.detach() for name, t in gathered.items()}
            if self._has_one_path and not layer.at_cuts:
                self._stack.write(number, self._past_length, waiting)
            else:
                kept.tensors = {name: self._put_aside(t) for name, t in waiting.items()}
            self._kept.append(kept)
            # Free the layer's full keys and values before the next layer is copied.
            captured[number] = layer = None
        self._cut_on_stack = 0 if self._has_one_path else None

    def past_of_child(self, child: Partition) -> list[Tensors]:
        """Prepare the past of a child partition, without graph.

        Returns:
            Per layer: state and context at the cut for recurrent layers; empty for attention layers, whose past is put
            on the stack.
        """
        cut, path = self._path_to(child)
        past: list[Tensors] = []
        for number, layer in enumerate(self._kept):
            if layer.at_cuts:
                past.append({name: self._on_device(t)[cut].clone() for name, t in layer.tensors.items()})
                continue
            past.append({})
            if cut != self._cut_on_stack:
                on_path = {name: self._on_device(t)[path] for name, t in layer.tensors.items()}
                self._stack.write(number, self._past_length, on_path)
        self._cut_on_stack = cut
        return past

    def receive(self, gradients: Sequence[Tensors], child: Partition) -> None:
        """Add the gradients of a child's past; with a single cut, the stack already has those of attention layers.

        Args:
            gradients: at least float32, in the shapes that `past_of_child` returned for this `child`.
            child: as given to `past_of_child`.
        """
        cut, path = self._path_to(child)
        for number, (layer, sent) in enumerate(zip(self._kept, gradients, strict=True)):
            if not layer.at_cuts and self._has_one_path:
                continue
            for name, like in layer.like.items():
                total = sent[name] if layer.at_cuts else self._taken((number, name), len(path))
                if total is None:
                    continue
                if name not in layer.sums:
                    layer.sums[name] = _zeros(like, path.device)
                # Indices of a path are distinct, so plain indexing adds each once and is deterministic.
                layer.sums[name][cut if layer.at_cuts else path] += total

    def backward(self, loss: torch.Tensor) -> list[Tensors]:
        """One graph traversal from the loss and all relayed tensors; gradients of the past's keys and values are added
        to the sums on the stack.

        Args:
            loss: scalar that depends on the module's output, so that FSDP2 unshards before the layers' backward.

        Returns:
            Per layer, gradients of the incoming state and context, at least float32; empty for a partition of roots.
        """
        kept, self._kept = self._kept, []
        roots = [get_gradient_edge(loss)] if loss.requires_grad else []
        gradients = [torch.ones_like(loss)] if loss.requires_grad else []
        for number, layer in enumerate(kept):
            for name, like in layer.like.items():
                total = layer.sums.pop(name, None)
                if total is None and not layer.at_cuts and self._has_one_path:
                    total = self._taken((number, name), len(like))
                if name in layer.edges:
                    roots.append(layer.edges[name])
                    gradients.append(
                        torch.zeros_like(like, device=loss.device) if total is None else total.to(like.dtype)
                    )
        # Free what children read before the traversal, which needs the memory.
        del kept
        if roots:
            torch.autograd.backward(roots, gradients)
        upward = []
        for tensors in self._past:
            upward.append({name: _as_float(tensor) for name, tensor in tensors.items()})
            for tensor in tensors.values():
                tensor.grad = None
        return upward

    def _path_to(self, child: Partition) -> tuple[int, torch.Tensor]:
        """The cut from which a child continues, and int64 indices into the relayed tokens: the cut's token and its
        ancestors inside the partition."""
        ((number, path),) = ((i, cut.path) for i, cut in enumerate(self._cuts) if cut.token == child.cut_token)
        return number, to_device(np.searchsorted(self._relayed, path), self._stack.device)

    def _on_device(self, waiting: torch.Tensor) -> torch.Tensor:
        return waiting.to(self._stack.device, non_blocking=True)

    @property
    def _has_one_path(self) -> bool:
        """True if the relayed tokens are a single path to a single cut; they are then stored on the stack only."""
        return len(self._cuts) == 1

    def _taken(self, key: Key, num_tokens: int) -> torch.Tensor | None:
        """Take the gradient sums of this partition's tokens from the stack and reset them there to 0."""
        return self._stack.take_gradient(key, self._past_length, self._past_length + num_tokens)

    def _put_aside(self, tensor: torch.Tensor) -> torch.Tensor:
        if not (self._stack.on_host and tensor.is_cuda):
            return tensor
        return torch.empty_like(tensor, device="cpu", pin_memory=True).copy_(tensor, non_blocking=True)


def _past_of(stack: PathStack, past: Sequence[Tensors], length: int, layer: int) -> LayerTensors:
    return past[layer] or stack.past(layer, length)


def _zeros(like: torch.Tensor, device: torch.device) -> torch.Tensor:
    return torch.zeros(like.shape, dtype=accumulation_dtype(like.dtype), device=device)


def _as_float(leaf: torch.Tensor) -> torch.Tensor:
    """A leaf's gradient in at least float32; zeros if it has none."""
    return _zeros(leaf, leaf.device) if leaf.grad is None else leaf.grad.to(accumulation_dtype(leaf.dtype), copy=True)
