"""verl's checkpoint backend `gloo`: sends weights from the trainer to separate rollout servers through host memory.

verl's other backends need GPUs; `tree_separate_async` uses this one without them. Select it with
`rollout.checkpoint_engine.backend=gloo` and `.custom_backend_module=<this module>`.
"""

import asyncio
from collections.abc import AsyncGenerator, Generator
from datetime import timedelta
from typing import Any

import numpy as np
import ray
import torch
from torch.distributed import BroadcastOptions, ProcessGroupGloo, TCPStore
from verl.checkpoint_engine import CheckpointEngine, CheckpointEngineRegistry

from tree_rl.verl_plugin.embedded_rollout.weight_buckets import pack, unpack

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
            await asyncio.to_thread(self._send, np.empty(0, dtype=np.uint8))

    async def receive_weights(self, global_steps: int | None = None) -> AsyncGenerator[tuple[str, torch.Tensor], None]:
        """Receive (name, tensor) pairs in host memory; `global_steps` is unused."""
        while bucket := await asyncio.to_thread(self._receive):
            for named in bucket.items():
                yield named

    def _broadcast(self, tensor: torch.Tensor) -> torch.Tensor:
        assert self._group is not None, "weights are sent between init_process_group and finalize"
        options = BroadcastOptions()
        options.rootRank = SENDER
        if tensor.numel():
            self._group.broadcast([tensor], options).wait()  # type: ignore[attr-defined]  # torch's stubs lack it
        return tensor

    def _send(self, bucket: np.ndarray) -> None:
        """Send the length and the bytes of a bucket; an empty bucket ends the weights."""
        self._broadcast(torch.tensor([len(bucket)]))
        self._broadcast(torch.from_numpy(bucket.copy()))

    def _receive(self) -> dict[str, torch.Tensor]:
        (num_bytes,) = self._broadcast(torch.zeros(1, dtype=torch.int64)).tolist()
        return unpack(self._broadcast(torch.empty(num_bytes, dtype=torch.uint8)).numpy()) if num_bytes else {}
