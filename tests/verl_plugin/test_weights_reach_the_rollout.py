"""Weights of the trainer's engine reach the embedded rollout model under its own names, experts and images' towers too,
and every rollout worker as they were sent through verl's checkpoint backend `gloo`."""

import asyncio
import pickle
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from engine_harness import build_engine, save_model, tiny_qwen3
from safetensors.torch import load_file
from tiny_families import CONFIGS
from verl.checkpoint_engine import CheckpointEngineRegistry
from verl.workers.config import HFModelConfig, RolloutConfig
from wrapped_models import wrapped_config, wrapped_model

from tree_rl.verl_plugin.embedded_rollout.gloo_weights import BACKEND, GlooCheckpointEngine
from tree_rl.verl_plugin.embedded_rollout.server import build_model
from tree_rl.verl_plugin.embedded_rollout.weight_buckets import load, pack, unpack
from tree_rl.verl_plugin.options import TreeConfig


@pytest.mark.parametrize("family", ("qwen3_moe", "gemma3", "qwen3_vl"))
def test_every_weight_arrives(tmp_path: Path, family: str) -> None:
    if family in CONFIGS:
        save_model(tmp_path, CONFIGS[family])
    else:
        wrapped_model(wrapped_config(family, tied=family == "gemma3")).save_pretrained(tmp_path)
    sent = dict(build_engine(tmp_path, tree=TreeConfig()).get_per_tensor_param()[0])
    config = RolloutConfig(name="hf", tensor_model_parallel_size=1, dtype="float32")
    torch.manual_seed(1)
    model = HFModelConfig(path=str(tmp_path), load_tokenizer=False)
    follows, published = (build_model(config, model, weights_follow=follows) for follows in (True, False))
    for bucket in pack(sent.items(), 10_000):
        load(follows, bucket)
    expected = published.state_dict()
    assert all(torch.equal(tensor, expected[name]) for name, tensor in follows.state_dict().items())
    if family in CONFIGS:
        assert any(".experts.3.up_proj." in name for name in sent)
        with pytest.raises(KeyError, match=r"experts\.9\.up_proj"):
            load(follows, next(pack([("model.layers.0.mlp.experts.9.up_proj.weight", torch.zeros(1))], 1)))


@pytest.mark.parametrize("rank", (0, 4), ids=("all weights", "adapter"))
def test_a_tied_weight_is_sent_once_as_in_a_checkpoint(tmp_path: Path, rank: int) -> None:
    save_model(tmp_path, tiny_qwen3(tie_word_embeddings=True))
    engine = build_engine(tmp_path, tree=TreeConfig(), model={"lora_rank": rank, "lora_alpha": 8})
    sent = [name.replace(".base_layer", "") for name, _ in engine.get_per_tensor_param()[0]]
    assert sorted(sent) == sorted(load_file(tmp_path / "model.safetensors"))


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
def test_every_rollout_worker_receives_what_trainers_hold(bucket_size: int, monkeypatch: pytest.MonkeyPatch) -> None:
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
