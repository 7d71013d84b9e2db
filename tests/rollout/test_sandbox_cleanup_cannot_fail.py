"""Whatever a session leaves, its folder goes or is passed over: no `close` raises, and the next sandbox starts.

Without a namespace, a process that left its group is found by its folder or HOME; nothing else is touched.
"""

import logging
import os
import shutil
import subprocess
import time
from collections.abc import Iterator
from contextlib import closing, contextmanager
from pathlib import Path

import pytest
from live_processes import wait_until_gone
from sandboxes_here import folder_here

from tree_rl.rollout.sandbox.files.trees import remove_tree
from tree_rl.rollout.sandbox.ownership import PREFIX, remove_left_over_folders
from tree_rl.rollout.sandbox.processes.limits import Limits
from tree_rl.rollout.sandbox.processes.processes import children_of, kill_processes_in
from tree_rl.rollout.sandbox.sandbox_folder import SandboxFolder

LEFT = {
    "1,500 folders": "for i in range(1500): os.mkdir('d'); os.chdir('d')\nopen('x', 'w').close()",
    "long names": "for i in range(40): os.mkdir('n' * 200); os.chdir('n' * 200)",
    "locked": "os.makedirs('a/b/c'); open('a/b/c/x', 'w').close()\nfor f in ('a/b/c', 'a/b', 'a'): os.chmod(f, 0)",
    "strange names": "for n in (b'\\xff', b'-rf', b'new\\nline', b'.removed'): os.mkdir(n); os.chmod(n, 0)",
    "not files": "os.mkfifo('p'); os.symlink('/etc', 'd'); os.mkdir('w'); os.chmod('w', 0o111)",
    "wide": "for i in range(3000): os.mkdir(f'd{i}'); open(f'd{i}/x', 'w').close()",
}


@pytest.mark.parametrize("left", LEFT)
def test_close_removes_whatever_a_command_left(left: str) -> None:
    patient = Limits(timeout_seconds=60, cpu_seconds=30)
    with closing(folder_here({"make.py": f"import os\n{LEFT[left]}"}, limits=patient)) as sandbox:
        result = sandbox.run("python3 make.py")
        assert result.exit_code == 0 or "disk limit" in result.output, result
    assert not sandbox.directory.parent.exists()


def chattr(flag: str, path: Path) -> bool:
    if os.geteuid() != 0 or shutil.which("chattr") is None:
        return False
    return subprocess.run(["chattr", flag, str(path)], capture_output=True, check=False).returncode == 0


def test_what_cannot_be_removed_is_logged_and_passed_over(
    open_folder: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr("tempfile.tempdir", str(open_folder))
    left = open_folder / f"{PREFIX}sandbox-left"
    held = left / "files" / "deep" / "held"
    held.mkdir(parents=True)
    (held / "file").write_text("x")
    (left / "files" / "other").write_text("x")
    if not chattr("+i", held / "file"):
        pytest.skip("needs root and a file system with immutable files")
    try:
        with caplog.at_level(logging.WARNING):
            assert remove_left_over_folders() == []
        assert str(left) in caplog.text
        assert [path.name for path in left.rglob("*") if path.is_file()] == ["file"]
        with closing(folder_here({"a": "b"})) as sandbox:
            assert sandbox.run("cat a").output == "b"
            sandbox.write("stays", "x")
            assert chattr("+i", sandbox.directory / "stays")
        # `close` told and did not raise.
        assert str(sandbox.directory.parent) in caplog.text
    finally:
        for path in (*open_folder.rglob("file"), *open_folder.rglob("stays")):
            chattr("-i", path)
        for path in tuple(open_folder.iterdir()):
            assert remove_tree(path)


def test_a_folder_that_is_a_link_or_gone_is_no_error(tmp_path: Path) -> None:
    (tmp_path / "precious").mkdir()
    (tmp_path / "precious/file").write_text("x")
    (tmp_path / "link").symlink_to(tmp_path / "precious")
    assert not remove_tree(tmp_path / "link")
    assert remove_tree(tmp_path / "missing")
    assert (tmp_path / "precious/file").read_text() == "x"


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


def test_a_process_that_ended_has_no_children() -> None:
    process = subprocess.Popen(["true"])
    process.wait()
    assert children_of(process.pid) == set()


@pytest.mark.parametrize(
    "hide", ["setsid sleep {0} >/dev/null 2>&1 &", "cd /; setsid nohup sleep {0} >/dev/null 2>&1 &"]
)
def test_a_command_that_returns_leaves_nothing(hide: str) -> None:
    seconds = f"500.{time.monotonic_ns()}"
    with closing(SandboxFolder(unconfined=True)) as sandbox:
        time.sleep(1.5)  # longer than clocks may be off, so that only younger processes are looked at
        assert sandbox.run(hide.format(seconds) + " sleep 0.2").exit_code == 0
        wait_until_gone(f"sleep {seconds}")
