"""The command in this process, the real vocabulary and the real trajectories."""

import contextlib
import io
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from tree_rl import cli

EXAMPLES = Path(__file__).parents[2] / "examples"


@pytest.fixture
def tree_rl(monkeypatch: pytest.MonkeyPatch) -> Callable[..., tuple[int, str, str]]:
    """Run the console script's entry point; returns exit code, standard output, standard error."""

    def run(*arguments: object) -> tuple[int, str, str]:
        monkeypatch.setattr(sys, "argv", ["tree-rl", *map(str, arguments)])
        out, err = io.StringIO(), io.StringIO()
        with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err), pytest.raises(SystemExit) as ended:
            cli.main()
        return int(ended.value.code or 0), out.getvalue(), err.getvalue()

    return run


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
