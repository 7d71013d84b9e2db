"""Bytes of tensors that are alive, counted storage by storage as operations make them."""

import weakref
from collections.abc import Callable
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from tree_rl.training.memory.host_slab import HostSlab


class LiveBytes(TorchDispatchMode):
    """Counts storages that are made while it is active; host memory of a slab does not count."""

    def __init__(self, slab: HostSlab | None = None) -> None:
        super().__init__()
        self.alive = self.peak = 0
        self._slab = slab
        self._known: dict[int, weakref.ref[Any]] = {}

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = function(*args, **(kwargs or {}))
        given = {id(t.untyped_storage()) for t in tree_leaves((args, kwargs)) if isinstance(t, torch.Tensor)}
        for tensor in tree_leaves(result):
            if isinstance(tensor, torch.Tensor) and tensor.device.type != "meta":
                storage = tensor.untyped_storage()
                if id(storage) not in given and id(storage) not in self._known and not self._is_host(storage):
                    self._count(storage)
        return result

    def _is_host(self, storage: torch.UntypedStorage) -> bool:
        return self._slab is not None and storage.data_ptr() == self._slab._bytes.untyped_storage().data_ptr()

    def _count(self, storage: torch.UntypedStorage) -> None:
        size, key = storage.nbytes(), id(storage)

        def gone(_: object) -> None:
            del self._known[key]
            self.alive -= size

        self._known[key] = weakref.ref(storage, gone)
        self.alive += size
        self.peak = max(self.peak, self.alive)


def peak_bytes(run: Callable[[], object], slab: HostSlab | None = None) -> int:
    """Most bytes alive at a time of what `run` makes."""
    with LiveBytes(slab) as counted:
        run()
    return counted.peak
