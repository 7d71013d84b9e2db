"""Bytes of tensors that are alive, counted as they come and go; on a CPU, where no allocator keeps a peak."""

import weakref
from collections.abc import Callable
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves


class LiveBytes(TorchDispatchMode):
    """Counts storages that operations under it make; those that were there before count nothing."""

    def __init__(self, existing: list[torch.Tensor]) -> None:
        """Start at 0.

        Args:
            existing: tensors that are alive already, such as parameters.
        """
        super().__init__()
        self._seen = weakref.WeakSet[Any]()
        for tensor in existing:
            self._seen.add(tensor.untyped_storage())
        self.now = 0
        self.peak = 0

    def __torch_dispatch__(
        self, function: Callable[..., Any], types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        """Run one operation and count what it made."""
        made = function(*args, **(kwargs or {}))
        for tensor in tree_leaves(made):
            if isinstance(tensor, torch.Tensor) and not tensor.is_meta:
                self._count(tensor.untyped_storage())
        return made

    def _count(self, storage: torch.UntypedStorage) -> None:
        if storage in self._seen:
            return
        self._seen.add(storage)
        size = storage.nbytes()
        self.now += size
        self.peak = max(self.peak, self.now)
        weakref.finalize(storage, self._free, size)

    def _free(self, size: int) -> None:
        self.now -= size
