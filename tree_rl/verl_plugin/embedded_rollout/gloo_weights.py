"""verl's checkpoint backend `gloo`: sends weights from the trainer to separate rollout servers through host memory.

verl's other backends need GPUs; `tree_separate_async` uses this one without them. Select it with
`rollout.checkpoint_engine.backend=gloo` and `.custom_backend_module=<this module>`.
"""

import asyncio
import json
import math
from collections.abc import AsyncGenerator, Generator, Iterable
from dataclasses import dataclass
from datetime import timedelta
from itertools import accumulate
from typing import Any

import numpy as np
import ray
import torch
from torch.distributed import BroadcastOptions, ProcessGroupGloo, TCPStore
from verl.checkpoint_engine import CheckpointEngine, CheckpointEngineRegistry

from tree_rl.verl_plugin.embedded_rollout.weight_buckets import PackedTensor, pack

BACKEND = "gloo"
SENDER = 0
OUTSIDE = -1
"""Rank of trainer processes that only help to gather the weights."""
TIMEOUT = timedelta(minutes=10)
Meeting = tuple[str, int]
"""Host and port of the rendezvous of one synchronisation."""


@CheckpointEngineRegistry.register(BACKEND)
class GlooCheckpointEngine(CheckpointEngine):
    """The trainer's first process (`is_master`) broadcasts buckets of weights to all rollout workers."""

    def __init__(self, bucket_size: int, is_master: bool = False) -> None:
        self.bucket_bytes = bucket_size
        self.is_master = is_master
        self._rank = OUTSIDE
        self._store: TCPStore | None = None
        self._group: ProcessGroupGloo | None = None

    def prepare(self) -> Meeting | None:
        """Open the rendezvous on the trainer's first process."""
        if not self.is_master:
            return None
        host = ray.util.get_node_ip_address().strip("[]")
        self._store = TCPStore(host, 0, is_master=True, wait_for_workers=False, timeout=TIMEOUT)
        return host, self._store.port

    @classmethod
    def build_topology(
        cls, actor_wg_world_size: int, rollout_world_size: int, metadata: list[Meeting | None]
    ) -> tuple[dict[str, list[Any]], dict[str, list[Any]]]:
        """Assign ranks: the trainer's first process sends, its others get OUTSIDE, the rollout workers receive."""
        world_size = 1 + rollout_world_size

        def arguments(ranks: list[int]) -> dict[str, list[Any]]:
            return {"rank": ranks, "world_size": [world_size] * len(ranks), "meeting": [metadata[0]] * len(ranks)}

        actors = arguments([SENDER] + [OUTSIDE] * (actor_wg_world_size - 1))
        return actors, arguments(list(range(1, world_size)))

    def init_process_group(self, rank: int, world_size: int, meeting: Meeting) -> None:
        """Join the process group at the sender's rendezvous, except with rank OUTSIDE."""
        self._rank = rank
        if rank == OUTSIDE:
            return
        if self._store is None:
            self._store = TCPStore(*meeting, is_master=False, timeout=TIMEOUT)
        self._group = ProcessGroupGloo(self._store, rank, world_size, TIMEOUT)

    def finalize(self) -> None:
        """Leave the group. The next synchronisation forms a new one, so servers may come and go in between."""
        self._group = None
        self._store = None

    @torch.no_grad()
    async def send_weights(
        self, weights: Generator[tuple[str, torch.Tensor], None, None], global_steps: int | None = None
    ) -> None:
        """Send (Hugging Face name, full tensor) pairs; all trainer processes help to gather them.

        `global_steps` is unused, because verl sends the version to the receivers.
        """
        for bucket in pack(weights, self.bucket_bytes):
            if self._rank == SENDER:
                await asyncio.to_thread(self._send, bucket)
        if self._rank == SENDER:
            await asyncio.to_thread(self._send, [])

    async def receive_weights(self, global_steps: int | None = None) -> AsyncGenerator[tuple[str, torch.Tensor], None]:
        """Receive (name, tensor) pairs in host memory; `global_steps` is unused."""
        while bucket := await asyncio.to_thread(self._receive):
            for packed in bucket:
                yield packed.name, packed.unpack()

    def _broadcast(self, tensor: torch.Tensor) -> torch.Tensor:
        assert self._group is not None, "weights are sent between init_process_group and finalize"
        options = BroadcastOptions()
        options.rootRank = SENDER
        if tensor.numel():
            self._group.broadcast([tensor], options).wait()  # type: ignore[attr-defined]  # torch's stubs lack it
        return tensor

    def _send(self, bucket: list[PackedTensor]) -> None:
        """Send two lengths, names with shapes, and the bytes of all tensors; an empty bucket ends the weights."""
        labels = write_labels(bucket)
        data = np.concatenate([packed.data for packed in bucket]) if bucket else np.zeros(0, dtype=np.uint8)
        self._broadcast(torch.tensor([len(labels), len(data)]))
        self._broadcast(torch.frombuffer(bytearray(labels), dtype=torch.uint8))
        self._broadcast(torch.from_numpy(data))

    def _receive(self) -> list[PackedTensor]:
        label_bytes, data_bytes = self._broadcast(torch.zeros(2, dtype=torch.int64)).tolist()
        labels = read_labels(self._broadcast(torch.empty(label_bytes, dtype=torch.uint8)).numpy().tobytes())
        ends = list(accumulate(label.num_bytes for label in labels))
        if (ends or [0])[-1] != data_bytes:
            raise ValueError(f"weights from the trainer: {data_bytes} bytes, expected {ends[-1:]} by their shapes")
        data = self._broadcast(torch.empty(data_bytes, dtype=torch.uint8)).numpy()
        return [
            PackedTensor(name=label.name, data=data[end - label.num_bytes : end], dtype=label.dtype, shape=label.shape)
            for label, end in zip(labels, ends, strict=True)
        ]


@dataclass(frozen=True, kw_only=True, slots=True)
class Label:
    """Description of a tensor, sent before its bytes."""

    name: str
    dtype: torch.dtype
    shape: tuple[int, ...]

    @property
    def num_bytes(self) -> int:
        return math.prod(self.shape) * self.dtype.itemsize


def write_labels(bucket: Iterable[PackedTensor]) -> bytes:
    """Names, dtypes and shapes as JSON, because unpickling another process's data could run code."""
    labels = [(packed.name, str(packed.dtype).removeprefix("torch."), packed.shape) for packed in bucket]
    return json.dumps(labels).encode()


def read_labels(content: bytes) -> list[Label]:
    """Read the output of `write_labels`; raises a ValueError for anything else."""
    try:
        return [_checked_label(*entry) for entry in json.loads(content)]
    except (ValueError, TypeError, RecursionError) as error:
        raise ValueError(
            f"weights from the trainer: expected a list of names, dtypes and shapes, received "
            f"{content[:60]!r} ({error}); do trainer and rollout run the same version of tree_rl?"
        ) from error


def _checked_label(name: object, dtype_name: object, shape: object) -> Label:
    dtype = getattr(torch, dtype_name, None) if isinstance(dtype_name, str) else None
    if not isinstance(name, str) or not isinstance(dtype, torch.dtype):
        raise TypeError(f"{name!r:.60} of dtype {dtype_name!r:.60}")
    if not isinstance(shape, list) or not all(type(size) is int and size >= 0 for size in shape):
        raise TypeError(f"shape {shape!r:.60} of {name!r:.60}")
    return Label(name=name, dtype=dtype, shape=tuple(shape))
