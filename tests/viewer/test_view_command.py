"""`tree-rl view` as a user types it."""

import signal
import subprocess
import sys
import urllib.request
from collections.abc import Callable
from pathlib import Path

import pytest
from record_files import write

COMMAND = [sys.executable, "-c", "from tree_rl.cli import main; main()", "view"]
Run = Callable[..., tuple[int, str, str]]


def test_served_page_is_the_written_one_and_ctrl_c_ends_it(tree_rl: Run, tmp_path: Path) -> None:
    path = write(tmp_path / "rows.jsonl", [{"input_ids": [1, 2, 3]}, {"input_ids": [1, 2, 4]}])
    assert tree_rl("view", path, "--html", tmp_path / "page.html")[0] == 0
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


@pytest.mark.filterwarnings("error")
def test_rewards_near_the_largest_float_raise_no_warning(tree_rl: Run, tmp_path: Path) -> None:
    path = write(tmp_path / "rows.jsonl", [{"input_ids": [1, 2, token], "reward": 1e308} for token in (3, 4)])
    code, _, err = tree_rl("view", path, "--html", tmp_path / "page.html")
    assert (code, err) == (0, "")


@pytest.mark.parametrize(
    ("text", "options", "said"),
    [
        ('{"input_ids": [1], "reward": {"a": 1}}\n', [], "column reward: expected a number"),
        ('{"input_ids": [1], "advantages": [1, 2]}\n', [], "column advantages: expected 1 numbers"),
        ('{"input_ids": [1], "advantages": "high"}\n', [], "row 0, column advantages: expected a number"),
        ('{"input_ids": [1]}\n', ["--html", "."], "expected a file to write"),
        ('{"input_ids": [1]}\n', ["--port", "70000"], "received 70000"),
        ('{"input_ids": [1]}\n', ["--max-tokens", "0"], "--max-tokens"),
    ],
)
def test_mistakes_end_in_one_line(tree_rl: Run, tmp_path: Path, text: str, options: list[str], said: str) -> None:
    path = tmp_path / "rows.jsonl"
    path.write_text(text)
    code, _, err = tree_rl("view", path, *options)
    assert (code, err.count("\n")) == (2, 1) and said in err
