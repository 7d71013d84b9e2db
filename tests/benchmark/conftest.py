"""One thread: these models are too small for more. And no interpreter, which the kernels' own tests turn on."""

import pytest
import torch

torch.set_num_threads(1)


@pytest.fixture(autouse=True)
def no_interpreter(monkeypatch: pytest.MonkeyPatch) -> None:
    """Implementations are chosen as for a user, also where one process runs the kernels' tests too."""
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)
