from collections.abc import Iterator
from contextlib import AbstractContextManager
from pathlib import Path
from types import SimpleNamespace

import pytest
from vllm_harness import ROLLOUT_OVERRIDES, environment, save_model


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


def _serving(folder: Path, *overrides: str, experts: int = 0) -> AbstractContextManager[SimpleNamespace]:
    from gateway_harness import build_tokenizer
    from verl_server import serve

    tokenizer = build_tokenizer()
    model = save_model(folder, tokenizer, experts=experts)
    return serve(model, tokenizer, *ROLLOUT_OVERRIDES, *overrides, environment=environment())
