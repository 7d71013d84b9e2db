"""Weights that travel through verl's checkpoint backend `gloo` arrive as they were sent, at every rollout worker."""

import asyncio
import pickle
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np
import pytest
import torch
from verl.checkpoint_engine import CheckpointEngineRegistry

from tree_rl.verl_plugin.embedded_rollout.gloo_weights import BACKEND, GlooCheckpointEngine
from tree_rl.verl_plugin.embedded_rollout.weight_buckets import unpack


def weights() -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    return {
        "embed": torch.randn(97, 32, generator=generator),
        "half": torch.randn(33, 5, generator=generator).to(torch.bfloat16),
        "transposed": torch.randn(8, 16, generator=generator).t(),
        "odd bytes": torch.arange(7, dtype=torch.uint8),
        "behind odd bytes": torch.randn(64, generator=generator),
        "scalar": torch.tensor(2.5),
        "scalar of two bytes": torch.tensor(-1.5, dtype=torch.bfloat16),
        "empty": torch.zeros(0, 4),
        "empty of one byte": torch.zeros(3, 0, 2, dtype=torch.float8_e5m2),
        "float8": torch.randn(5, 3, generator=generator).to(torch.float8_e4m3fn),
        "float8 after it": torch.randn(7, generator=generator).to(torch.float8_e5m2),
        "truths": torch.tensor([True, False, True]),
        "long": torch.arange(-3, 3),
        "complex": torch.randn(2, 3, generator=generator, dtype=torch.complex64),
        'ü "quoted"\n': torch.ones(2),
    }


def together(calls: list[Callable[[], Any]]) -> list[Any]:
    """Run the calls at once, as verl does in its processes; none waits for ever."""
    pool = ThreadPoolExecutor(len(calls))
    return [future.result(60) for future in [pool.submit(call) for call in calls]]


def synchronise(trainers: list[GlooCheckpointEngine], rollouts: list[GlooCheckpointEngine]) -> list[dict[str, Any]]:
    """One synchronisation as verl's CheckpointEngineManager runs it; what each rollout worker received."""
    everyone = trainers + rollouts
    metadata = [engine.prepare() for engine in everyone]
    actor_arguments, rollout_arguments = GlooCheckpointEngine.build_topology(len(trainers), len(rollouts), metadata)
    given = ((actor_arguments, trainers), (rollout_arguments, rollouts))
    arguments = [{k: v[i] for k, v in of_all.items()} for of_all, engines in given for i in range(len(engines))]
    together([lambda e=e, a=a: e.init_process_group(**a) for e, a in zip(everyone, arguments, strict=True)])
    consumed: list[int] = []

    def produce() -> Iterator[tuple[str, torch.Tensor]]:
        yield from weights().items()
        consumed.append(1)

    async def receive(engine: GlooCheckpointEngine) -> dict[str, torch.Tensor]:
        return {name: tensor async for name, tensor in engine.receive_weights()}

    senders = [lambda e=e: asyncio.run(e.send_weights(produce())) for e in trainers]
    results = together(senders + [lambda e=e: asyncio.run(receive(e)) for e in rollouts])
    # Gathering weights is collective: a trainer process that sends nothing must still read them all.
    assert len(consumed) == len(trainers)
    for engine in everyone:
        engine.finalize()
    return results[len(trainers) :]


@pytest.mark.parametrize("bucket_size", [1, 600])
def test_every_rollout_worker_receives_what_the_trainer_holds(
    bucket_size: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("ray.util.get_node_ip_address", lambda: "127.0.0.1")
    build = CheckpointEngineRegistry.get(BACKEND)
    trainers = [build(bucket_size=bucket_size, is_master=rank == 0) for rank in range(2)]
    rollouts = [build(bucket_size=bucket_size) for _ in range(3)]
    for _ in range(2):
        for received in synchronise(trainers, rollouts):
            assert received.keys() == weights().keys()
            for name, sent in weights().items():
                assert (received[name].dtype, received[name].shape) == (sent.dtype, sent.shape)
                assert bytes_of(received[name]) == bytes_of(sent)


def bytes_of(tensor: torch.Tensor) -> bytes:
    return tensor.contiguous().view(-1).view(torch.uint8).numpy().tobytes()


@pytest.mark.parametrize("content", [b"", b"null", pickle.dumps([("w", torch.float32)]), b"[" * 100_000, b"\xff\xfe"])
def test_other_bytes_are_refused(content: bytes) -> None:
    with pytest.raises(ValueError, match=r"expected a bucket of safetensors(.|\n)*same version of tree_rl"):
        unpack(np.frombuffer(content, dtype=np.uint8))
