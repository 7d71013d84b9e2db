"""A small tokenizer, the real trajectories, commands that succeed, and commands that refuse."""

from collections.abc import Callable
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


@pytest.fixture
def printed(tree_rl: Callable[..., tuple[int, str, str]]) -> Callable[..., str]:
    """What a command that succeeds writes to standard output; it writes nothing to standard error."""

    def run(*arguments: object) -> str:
        code, out, err = tree_rl(*arguments)
        assert (code, err) == (0, ""), (arguments, err)
        return out

    return run


@pytest.fixture
def refused(tree_rl: Callable[..., tuple[int, str, str]]) -> Callable[..., None]:
    """A command ends with exit code 2, nothing on standard output and one short printable line on standard error."""

    def check(message: str, *arguments: object) -> None:
        code, out, err = tree_rl(*arguments)
        assert (code, out) == (2, ""), (arguments, out, err)
        assert message in err and len(err) < 700, (arguments, err)
        assert err.endswith("\n") and err[:-1].isprintable(), err

    return check
