"""Without a namespace, what left its process group is found by its folder or HOME; nothing else is touched."""

import subprocess
import time
from collections.abc import Iterator
from contextlib import closing, contextmanager
from pathlib import Path

import pytest
from live_processes import wait_until_gone

from tree_rl.rollout.sandbox.processes.processes import kill_processes_in
from tree_rl.rollout.sandbox.sandbox_folder import SandboxFolder


@contextmanager
def sleeper(place: Path, home: Path) -> Iterator[subprocess.Popen[bytes]]:
    """A process in a folder, ended at last."""
    process = subprocess.Popen(["sleep", "500"], cwd=place, env={"LEFT": "1", "HOME": str(home), "RIGHT": "1"})
    try:
        yield process
    finally:
        process.kill()
        process.wait()


def is_killed(process: subprocess.Popen[bytes]) -> bool:
    try:
        return process.wait(timeout=0.5) != 0
    except subprocess.TimeoutExpired:
        return False


@pytest.mark.parametrize(
    ("place", "home", "killed"),
    [("a", "b", True), ("a/deep", "b", True), ("b", "a", True), ("b", "a/deep", True), ("b", "aa", False)],
)
def test_processes_are_found_by_folder_and_home(tmp_path: Path, place: str, home: str, killed: bool) -> None:
    for name in ("a/deep", "aa", "b"):
        (tmp_path / name).mkdir(parents=True)
    since = time.time()
    with sleeper(tmp_path / place, tmp_path / home) as process:
        kill_processes_in(tmp_path / "a", since=since)
        assert is_killed(process) == killed


def test_older_processes_are_not_looked_at(tmp_path: Path) -> None:
    with sleeper(tmp_path, tmp_path) as process:
        kill_processes_in(tmp_path, since=time.time() + 60)
        assert not is_killed(process)


@pytest.mark.parametrize(
    "hide", ["setsid sleep {0} >/dev/null 2>&1 &", "cd /; setsid nohup sleep {0} >/dev/null 2>&1 &"]
)
def test_a_command_that_returns_leaves_nothing(hide: str) -> None:
    seconds = f"500.{time.monotonic_ns()}"
    with closing(SandboxFolder(unconfined=True)) as sandbox:
        time.sleep(1.5)  # longer than clocks may be off, so that only younger processes are looked at
        assert sandbox.run(hide.format(seconds) + " sleep 0.2").exit_code == 0
        wait_until_gone(f"sleep {seconds}")
