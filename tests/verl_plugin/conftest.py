from typing import Any

import pytest


@pytest.fixture
def queue(monkeypatch: pytest.MonkeyPatch) -> Any:
    """The trainer's queue of rows, in this process."""
    from local_trainer import local_queue

    return local_queue(monkeypatch)
