"""Inputs of checkpointed decoder layers wait for the backward in host memory.

Under non-reentrant checkpointing a layer's input is all that its forward keeps, and hooks on saved tensors around the
layer see exactly that. A copy leaves while the layer computes and returns while the backward is one layer above.
Legend: N tokens of a forward, C hidden size.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any
from weakref import WeakSet

import torch
from torch import nn
from torch.autograd.graph import saved_tensors_hooks
from transformers.modeling_layers import GradientCheckpointingLayer

from tree_rl.training.memory.host_slab import HostSlab, host_slab

CHECKPOINT = "_gradient_checkpointing_func"
"""Attribute of transformers' layers that holds `torch.utils.checkpoint.checkpoint` and its options."""


class OffloadedInputs:
    """Layer inputs of one micro-batch; several of its forwards may wait for their backward, each in its own room."""

    def __init__(self, module: nn.Module, *, layers: int, live_tokens: int) -> None:
        """Find the layers; host memory is taken with the first input.

        Args:
            module: a transformers model, wrapped or not.
            layers: how many decoder layers, from the first on; 0 leaves all inputs on the device.
            live_tokens: most tokens of all forwards that wait at a time.

        Raises:
            ValueError: the module does not run under non-reentrant gradient checkpointing.
        """
        self._layers = checkpointed_layers(module)[:layers] if layers else []
        self._live_tokens = live_tokens
        self._slab: HostSlab | None = None
        self._waiting: WeakSet[_ForwardInputs] = WeakSet()

    @contextmanager
    def of_forward(self) -> Iterator[None]:
        """Around one forward with gradients; what its layers save leaves for the host."""
        inputs = _ForwardInputs(self)
        stock = [getattr(layer, CHECKPOINT) for layer in self._layers]
        for number, (layer, checkpoint) in enumerate(zip(self._layers, stock, strict=True)):
            setattr(layer, CHECKPOINT, partial(inputs.run_layer, number, checkpoint))
        try:
            yield
        finally:
            for layer, checkpoint in zip(self._layers, stock, strict=True):
                setattr(layer, CHECKPOINT, checkpoint)
            inputs.settle()

    def slab_of(self, hidden_1NC: torch.Tensor) -> HostSlab:
        """The host memory of this micro-batch, reserved with its first input."""
        if self._slab is None:
            token_bytes = hidden_1NC.nbytes // hidden_1NC.shape[-2]
            self._slab = host_slab(hidden_1NC.device)
            self._slab.reserve(self, len(self._layers) * self._live_tokens * token_bytes)
        if self._slab.owner is not self:
            raise RuntimeError("another micro-batch took the host memory in which these layer inputs waited")
        return self._slab

    def claim(self, inputs: "_ForwardInputs", num_bytes: int) -> int:
        """Offset of free bytes behind all forwards that wait. A later forward's backward comes first."""
        self._waiting.add(inputs)
        assert self._slab is not None
        offset = max((forward.end for forward in self._waiting), default=0)
        if offset + num_bytes > self._slab.num_bytes:
            raise RuntimeError(
                f"layer inputs need {offset + num_bytes} bytes of host memory, expected at most "
                f"{self._slab.num_bytes} for {self._live_tokens} tokens in {len(self._layers)} layers"
            )
        return offset


class _ForwardInputs:
    """Layer inputs of one forward. Saved tensors refer to it: it dies with the forward's graph."""

    def __init__(self, run: OffloadedInputs) -> None:
        self._run = run
        self._slots: dict[int, tuple[int, torch.Tensor]] = {}
        """By layer: where its input lies in the slab, and that memory; gone when the backward asked for it."""
        self._leaving: _Copy | None = None
        self._arriving: dict[int, _Copy] = {}

    @property
    def end(self) -> int:
        """First byte of the slab behind what waits."""
        return max((offset + host.nbytes for offset, host in self._slots.values()), default=0)

    def run_layer(
        self,
        number: int,
        checkpoint: Callable[..., Any],
        function: Callable[..., Any],
        hidden_1NC: torch.Tensor,
        *args: Any,
        **kwargs: Any,
    ) -> Any:
        """In place of a layer's checkpoint: the same, but its input leaves."""
        self.settle()
        # The place and not the tensor: autograd keeps the hooks, and with them whatever they hold.
        pack = partial(self._pack, number, hidden_1NC.data_ptr(), hidden_1NC.shape)
        with saved_tensors_hooks(pack, _unpack):
            return checkpoint(function, hidden_1NC, *args, **kwargs)

    def settle(self) -> None:
        """Let go of the input on its way: the device goes on behind the copy, so the memory is free at once.

        A layer takes longer than the copy of its input, so nobody waits.
        """
        if self._leaving is not None:
            self._leaving.finish()
            self._leaving = None

    def _pack(self, number: int, place: int, shape: torch.Size, saved: torch.Tensor) -> "torch.Tensor | _Waiting":
        if saved.data_ptr() != place or saved.shape != shape:
            return saved
        slab = self._run.slab_of(saved)
        offset = self._run.claim(self, saved.nbytes)
        host = slab.view(offset, saved)
        self._slots[number] = (offset, host)
        self._leaving = _Copy(slab, source=saved, target=host)
        return _Waiting(self, number)

    def fetch(self, number: int, device: torch.device) -> torch.Tensor:
        """A layer's input on the device; that of the layer below sets out."""
        arriving = self._arriving.pop(number, None) or self._return(number, device)
        hidden_1NC = arriving.finish()
        if number - 1 in self._slots:
            self._arriving[number - 1] = self._return(number - 1, device)
        return hidden_1NC

    def _return(self, number: int, device: torch.device) -> "_Copy":
        _, host = self._slots.pop(number)
        return _Copy(self._run.slab_of(host.to(device) if False else host), source=host, target=host)


class _Waiting:
    """What autograd keeps instead of a layer's input."""


class _Copy:
    """One copy on the slab's stream."""


def _unpack(saved: "torch.Tensor | _Waiting") -> torch.Tensor:
    raise NotImplementedError
