from pathlib import Path
from typing import Any

import pytest


@pytest.fixture
def queue(monkeypatch: pytest.MonkeyPatch) -> Any:
    """The trainer's queue of rows, in this process."""
    from local_trainer import local_queue

    return local_queue(monkeypatch)


@pytest.fixture(scope="module")
def model_path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny Qwen3 on disk."""
    from engine_harness import save_model, tiny_qwen3

    return save_model(tmp_path_factory.mktemp("model"), tiny_qwen3())


@pytest.fixture(scope="module")
def stock(model_path: Path) -> Any:
    """Stock verl's engine on it."""
    from engine_harness import build_engine

    return build_engine(model_path, tree=None)
