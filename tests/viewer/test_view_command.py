"""`tree-rl view` as a user types it."""

import signal
import subprocess
import sys
import urllib.request
from collections.abc import Callable
from pathlib import Path

import pytest

Run = Callable[..., subprocess.CompletedProcess[str]]
COMMAND = [sys.executable, "-c", "from tree_rl.cli import main; main()", "view"]


@pytest.fixture
def view(tmp_path: Path) -> Run:
    """Runs the command in an empty folder."""

    def run(*arguments: object) -> subprocess.CompletedProcess[str]:
        command = [*COMMAND, *map(str, arguments)]
        return subprocess.run(command, capture_output=True, text=True, cwd=tmp_path, timeout=240)

    return run


def test_served_page_is_the_written_one_and_ctrl_c_ends_it(view: Run, rows_file: Callable[..., Path]) -> None:
    path = rows_file([{"input_ids": [1, 2, 3]}, {"input_ids": [1, 2, 4]}])
    assert view(path, "--html", "page.html").returncode == 0
    with subprocess.Popen([*COMMAND, str(path), "--no-browser"], stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        try:
            address = process.stdout.readline().split()[0]
            assert address.startswith("http://127.0.0.1:")
            with urllib.request.urlopen(address, timeout=60) as answer:
                served = answer.read()
        finally:
            process.send_signal(signal.SIGINT)
        assert process.wait(timeout=60) == 0
    assert served == (path.parent / "page.html").read_bytes()


def test_rewards_near_the_largest_float_raise_no_warning(view: Run, rows_file: Callable[..., Path]) -> None:
    path = rows_file([{"input_ids": [1, 2, token], "reward": 1e308} for token in (3, 4)])
    ended = view(path, "--html", "page.html")
    assert (ended.returncode, ended.stderr) == (0, "")


@pytest.mark.parametrize(
    ("text", "options", "said"),
    [
        ("", [], "expected at least one row"),
        ('{"input_ids": [1], "reward": {"a": 1}}\n', [], "column reward: expected a number"),
        ('{"input_ids": [1], "advantages": [1, 2]}\n', [], "column advantages: expected 1 numbers"),
        ('{"input_ids": [1], "advantages": "high"}\n', [], "row 0, column advantages: expected a number"),
        ('{"input_ids": [1]}\n', ["--html", "."], "expected a file to write"),
        ('{"input_ids": [1]}\n', ["--port", "70000"], "received 70000"),
        ('{"input_ids": [1]}\n', ["--max-tokens", "0"], "--max-tokens"),
    ],
)
def test_mistakes_end_in_one_line(
    tree_rl: Callable[..., tuple[int, str, str]], tmp_path: Path, text: str, options: list[str], said: str
) -> None:
    path = tmp_path / "rows.jsonl"
    path.write_text(text)
    code, _, err = tree_rl("view", path, *options)
    assert (code, err.count("\n")) == (2, 1) and said in err
