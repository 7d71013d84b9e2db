"""One thread: these models are too small for more. And no interpreter, which the kernels' own tests turn on."""

import sys
from pathlib import Path

import pytest
import torch

torch.set_num_threads(1)
# Scripts of benchmarks/ and what they import.
ROOT = Path(__file__).parents[2]
sys.path[:0] = [str(ROOT / "benchmarks"), str(ROOT / "recipes")]


@pytest.fixture(autouse=True)
def no_interpreter(monkeypatch: pytest.MonkeyPatch) -> None:
    """Implementations are chosen as for a user, also where one process runs the kernels' tests too."""
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)
