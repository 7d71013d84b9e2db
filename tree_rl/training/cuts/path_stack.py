"""Keys and values of the current partition's past, and the sums of their gradients: one buffer each.

Partitions run depth first, so the live ones are on one path, and a partition's past is a prefix of its child's. Writing
after a prefix overwrites only what an earlier sibling's subtree read. That is safe: a plan finishes all forwards and
backwards of one child before the next child starts. Legend: P tokens of a past, H heads, D head size.
"""

from typing import Any

import torch

from tree_kernels.accumulation import accumulation_dtype
from tree_rl.models.relay import LayerTensors
from tree_rl.training.memory.host_slab import host_slab

Key = tuple[int, str]
"""A layer and the name of one of its tensors."""


class PathStack:
    """Per attention layer: keys and values [longest, H, D], and their gradient sums of equal shape, at least float32.

    The compute stream copies to and from buffers on the host, one layer at a time.
    """

    def __init__(self, longest: int, device: torch.device, *, on_host: bool) -> None:
        """Allocate nothing yet; `longest` is the length of the longest past, `on_host` uses pinned host memory."""
        self._longest = longest
        self.device = device
        self.on_host = on_host
        # An input of every past, so that autograd calls the past's backward; it receives no gradient itself.
        self._anchor = torch.zeros((), device=device, requires_grad=True)
        self._values: dict[Key, torch.Tensor] = {}
        self._sums: dict[Key, torch.Tensor] = {}

    def write(self, layer: int, start: int, tensors: LayerTensors) -> None:
        """Write a layer's keys and values [n, H, D] from token `start` on."""
        for name, tensor in tensors.items():
            key = (layer, name)
            if key not in self._values:
                self._values[key] = self._buffer(f"{name} of layer {layer}", tensor, tensor.dtype)
            self._values[key][start : start + len(tensor)].copy_(tensor, non_blocking=True)

    def past(self, layer: int, length: int) -> LayerTensors:
        """A layer's keys and values of the first `length` tokens, on the device.

        With gradients enabled, the backward adds their gradients to the sums layer by layer, so only one layer's
        gradients exist besides the sums.
        """
        names = tuple(name for number, name in self._values if number == layer)
        if not torch.is_grad_enabled():
            return {name: self.read((layer, name), length) for name in names}
        tensors = _Past.apply(self._anchor, self, layer, names, length)
        return dict(zip(names, tensors, strict=True))

    def read(self, key: Key, length: int) -> torch.Tensor:
        """[length, H, D] on the device."""
        # .data has a separate version counter: autograd must not notice writes to other parts of the buffer.
        return self._values[key].data[:length].to(self.device, non_blocking=True)

    def add_gradient(self, key: Key, gradient: torch.Tensor) -> None:
        """Add [P, H, D] to the sums of the first P tokens."""
        if key not in self._sums:
            layer, name = key
            dtype = accumulation_dtype(gradient.dtype)
            self._sums[key] = self._buffer(f"gradients of {name} of layer {layer}", gradient, dtype)
            self._clear(self._sums[key])
        sums = self._sums[key][: len(gradient)]
        sums.copy_(sums.to(self.device, non_blocking=True).add_(gradient), non_blocking=True)

    def take_gradient(self, key: Key, start: int, stop: int) -> torch.Tensor | None:
        """A copy of some tokens' sums, on the device, and reset them to 0; None if no gradient has arrived."""
        if key not in self._sums:
            return None
        sums = self._sums[key][start:stop]
        taken = sums.to(self.device, non_blocking=True, copy=True)
        self._clear(sums)
        return taken

    def _buffer(self, content: str, like: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
        shape = (self._longest, *like.shape[1:])
        if not self.on_host:
            return torch.empty(shape, dtype=dtype, device=self.device)
        slab = host_slab(self.device, content)
        slab.reserve(None, like[0].numel() * self._longest * dtype.itemsize)
        return slab.view(0, shape, dtype)

    def _clear(self, sums: torch.Tensor) -> None:
        if self.on_host:
            # A copy on the stream, so that it stays in order with pending copies to this memory.
            sums.copy_(torch.zeros_like(sums, device=self.device), non_blocking=True)
        else:
            sums.zero_()


class _Past(torch.autograd.Function):
    """Reads keys and values of a layer's past; the graph does not keep them alive."""

    @staticmethod
    def forward(
        ctx: Any, anchor: torch.Tensor, stack: PathStack, layer: int, names: tuple[str, ...], length: int
    ) -> tuple[torch.Tensor, ...]:
        """[P, H, D] each, in the order of the names."""
        ctx.stack, ctx.layer, ctx.names = stack, layer, names
        ctx.set_materialize_grads(False)
        return tuple(stack.read((layer, name), length) for name in names)

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor | None) -> tuple[None, ...]:
        """Add the gradients to the sums on the stack."""
        for name, gradient in zip(ctx.names, gradients, strict=True):
            if gradient is not None:
                ctx.stack.add_gradient((ctx.layer, name), gradient)
        return None, None, None, None, None
