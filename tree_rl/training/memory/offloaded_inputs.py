"""Keeps the inputs of checkpointed decoder layers in host memory until the backward.

With non-reentrant checkpointing a layer's forward saves only its input, so saved-tensor hooks around the layer see just
that tensor. It is copied to the host while the layer computes, and back while the backward runs the layer above.
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

from tree_rl.models.language_model import language_model
from tree_rl.training.memory.host_slab import HostSlab, host_slab

CHECKPOINT = "_gradient_checkpointing_func"
"""Attribute of transformers' layers: `torch.utils.checkpoint.checkpoint` with its options."""
Packed = torch.Tensor | partial[torch.Tensor]
"""What autograd saves: a tensor, or how a layer's input is fetched from the host."""


class OffloadedInputs:
    """Layer inputs of one micro-batch; several of its forwards may wait for their backward at the same time."""

    def __init__(self, module: nn.Module, *, layers: int, live_tokens: int) -> None:
        """Find the layers; host memory is reserved when the first input arrives.

        Args:
            module: a transformers model, possibly wrapped.
            layers: number of decoder layers to offload, counted from the first; 0 offloads nothing.
            live_tokens: most tokens of all forwards that wait at the same time.

        Raises:
            ValueError: the module does not run under non-reentrant gradient checkpointing.
        """
        self._layers = checkpointed_layers(module)[:layers] if layers else []
        self._live_tokens = live_tokens
        self._slab: HostSlab | None = None
        # Identifies this run to the slab; `self` would let the slab, which lives longer, keep the model alive.
        self._mark = object()
        self._waiting: WeakSet[_ForwardInputs] = WeakSet()

    @contextmanager
    def of_forward(self) -> Iterator[None]:
        """Offload the layer inputs of the one forward (with gradients) inside the context."""
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

    def slab(self, hidden_1NC: torch.Tensor) -> HostSlab:
        """The host memory of this micro-batch, reserved on the first call."""
        if self._slab is None:
            token_bytes = hidden_1NC.nbytes // hidden_1NC.shape[-2]
            self._slab = host_slab(hidden_1NC.device)
            self._slab.reserve(self._mark, len(self._layers) * self._live_tokens * token_bytes)
        if self._slab.owner is not self._mark:
            raise RuntimeError("another micro-batch took the host memory in which these layer inputs waited")
        return self._slab

    def place(self, inputs: "_ForwardInputs", num_bytes: int) -> int:
        """Offset of the first byte after all waiting inputs. Forwards run backward in reverse order, as on a stack."""
        self._waiting.add(inputs)
        assert self._slab is not None
        offset = max(waiting.end for waiting in self._waiting)
        if offset + num_bytes > self._slab.num_bytes:
            raise RuntimeError(
                f"expected at most {self._slab.num_bytes} bytes of inputs of {len(self._layers)} layers for "
                f"{self._live_tokens} tokens, received {offset + num_bytes}"
            )
        return offset


class _ForwardInputs:
    """Layer inputs of one forward. After it only saved tensors refer to this object, so it is freed with the graph."""

    def __init__(self, run: OffloadedInputs) -> None:
        self._run = run
        self._waiting: dict[int, tuple[int, torch.Tensor]] = {}
        """Layer -> offset and memory of its input on the host; removed when the backward asks for it."""
        self._leaving: _Copy | None = None
        self._arriving: dict[int, _Copy] = {}

    @property
    def end(self) -> int:
        """Offset of the first byte after the waiting inputs."""
        return max((offset + host.nbytes for offset, host in self._waiting.values()), default=0)

    def run_layer(
        self,
        number: int,
        checkpoint: Callable[..., Any],
        function: Callable[..., Any],
        hidden_1NC: torch.Tensor,
        *args: Any,
        **kwargs: Any,
    ) -> Any:
        """Replaces a layer's checkpoint function: calls it, and offloads the layer's input."""
        self.settle()
        # The address instead of the tensor: autograd keeps the hook alive, and with it whatever it refers to.
        pack = partial(self._pack, number, hidden_1NC.data_ptr(), hidden_1NC.shape)
        with saved_tensors_hooks(pack, _unpack):
            return checkpoint(function, hidden_1NC, *args, **kwargs)

    def settle(self) -> None:
        """Make the device wait for the last copy to the host, and free its source.

        A layer takes longer than the copy of its input, so in practice the device does not wait.
        """
        if self._leaving is not None:
            self._leaving.finish()
            self._leaving = None

    def fetch(self, number: int) -> torch.Tensor:
        """A layer's input on the device again; starts the copy for the layer below, which the backward needs next."""
        arriving = self._arriving.pop(number, None) or self._start_fetch(number)
        hidden_1NC = arriving.finish()
        if number - 1 in self._waiting:
            self._arriving[number - 1] = self._start_fetch(number - 1)
        return hidden_1NC

    def _pack(self, number: int, address: int, shape: torch.Size, saved: torch.Tensor) -> Packed:
        if saved.data_ptr() != address or saved.shape != shape:
            return saved
        slab = self._run.slab(saved)
        offset = self._run.place(self, saved.nbytes)
        host = slab.view(offset, saved.shape, saved.dtype)
        self._waiting[number] = (offset, host)
        self._leaving = _Copy(slab, source=saved, target=host)
        return partial(self.fetch, number)

    def _start_fetch(self, number: int) -> "_Copy":
        _, host = self._waiting.pop(number)
        slab = self._run.slab(host)
        return _Copy(slab, source=host, target=torch.empty_like(host, device=slab.device))


class _Copy:
    """A copy on the slab's stream, after all work queued on the device so far."""

    def __init__(self, slab: HostSlab, *, source: torch.Tensor, target: torch.Tensor) -> None:
        self._tensors: tuple[torch.Tensor, torch.Tensor] | None = (source, target)
        self._done: torch.cuda.Event | None = None
        self._device = slab.device
        if slab.stream is None:
            target.copy_(source)
            return
        slab.stream.wait_stream(torch.cuda.current_stream(slab.device))
        with torch.cuda.stream(slab.stream):
            target.copy_(source, non_blocking=True)
            self._done = slab.stream.record_event()

    def finish(self) -> torch.Tensor:
        """The target; work queued on the device from now on waits for the copy."""
        assert self._tensors is not None
        _, target = self._tensors
        if self._done is not None:
            torch.cuda.current_stream(self._device).wait_event(self._done)
        self._tensors = None
        return target

    def __del__(self) -> None:
        # A failed backward drops pending copies, and the allocator gives their memory to the device's stream.
        if self._tensors is not None:
            self.finish()


def checkpointed_layers(module: nn.Module) -> list[nn.Module]:
    """Decoder layers in order, without a tower's; raises ValueError unless all run under non-reentrant gradient
    checkpointing."""
    layers = [layer for layer in language_model(module).modules() if isinstance(layer, GradientCheckpointingLayer)]
    # Reentrant checkpointing would cut partitions' captured keys and values from the graph; trees never run with it.
    if not layers or not all(layer.gradient_checkpointing and _keeps_the_graph(layer) for layer in layers):
        raise ValueError(
            f"{type(module).__name__}: layer inputs can wait in host memory only under non-reentrant gradient "
            "checkpointing; set model.enable_gradient_checkpointing=true"
        )
    return layers


def _keeps_the_graph(layer: nn.Module) -> bool:
    checkpoint = getattr(layer, CHECKPOINT)
    return isinstance(checkpoint, partial) and checkpoint.keywords.get("use_reentrant") is False


def _unpack(saved: Packed) -> torch.Tensor:
    return saved() if isinstance(saved, partial) else saved
