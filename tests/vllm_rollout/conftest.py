import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace

import pytest
from vllm_harness import environment, save_model, start_server


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory) -> Iterator[SimpleNamespace]:
    """A model on disk, its tokenizer, and verl's client of the vLLM that serves it."""
    with _serving(tmp_path_factory.mktemp("model")) as everything:
        yield everything


@pytest.fixture(scope="module")
def served_experts(tmp_path_factory: pytest.TempPathFactory) -> Iterator[SimpleNamespace]:
    """The same with eight experts a layer, and their numbers returned with every answer."""
    replay = "actor_rollout_ref.rollout.enable_rollout_routing_replay=true"
    with _serving(tmp_path_factory.mktemp("model"), replay, experts=8) as everything:
        yield everything


@contextmanager
def _serving(folder: Path, *overrides: str, experts: int = 0) -> Iterator[SimpleNamespace]:
    import ray
    from gateway_harness import build_tokenizer

    tokenizer = build_tokenizer()
    model = save_model(folder, tokenizer, experts=experts)
    before = dict(os.environ)
    os.environ.update(environment())
    ray.init(num_cpus=8, num_gpus=1, include_dashboard=False, log_to_driver=True)
    try:
        manager = start_server(model, *overrides)
        yield SimpleNamespace(model=model, tokenizer=tokenizer, client=manager.get_client(), manager=manager)
    finally:
        ray.shutdown()
        os.environ.clear()
        os.environ.update(before)
