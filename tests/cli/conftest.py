"""The real vocabulary and the real trajectories."""

import subprocess
import sys
from pathlib import Path

import pytest

EXAMPLES = Path(__file__).parents[2] / "examples"


@pytest.fixture(scope="session")
def qwen_tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tokenizer folder with the Qwen vocabulary."""
    folder = tmp_path_factory.mktemp("qwen_tokenizer")
    subprocess.run([sys.executable, str(EXAMPLES / "write_qwen_tokenizer.py"), str(folder)], check=True, timeout=120)
    return folder


@pytest.fixture(scope="session")
def airline_trajectories() -> Path:
    """200 recorded tool-use trajectories: 50 tasks, 4 trials each."""
    return EXAMPLES / "tau_bench_airline" / "trajectories.json"
