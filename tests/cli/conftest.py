"""A small tokenizer, and the real trajectories."""

from pathlib import Path

import pytest
from byte_tokenizer import write_byte_tokenizer

EXAMPLES = Path(__file__).parents[2] / "examples"


@pytest.fixture(scope="session")
def chatml(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tokenizer folder with a token for each byte, and Qwen's chat template."""
    template = (EXAMPLES / "qwen_chat_template.jinja").read_text()
    return write_byte_tokenizer(tmp_path_factory.mktemp("chatml"), template)


@pytest.fixture(scope="session")
def airline_trajectories() -> Path:
    """200 recorded tool-use trajectories: 50 tasks, 4 trials each."""
    return EXAMPLES / "tau_bench_airline" / "trajectories.json"
