"""Whatever a session or a killed owner leaves goes or is passed over: no `close` raises, and the next sandbox starts.

Without a namespace, a process that left its group is found by its folder or HOME; nothing else is touched.
"""

import logging
import os
import shutil
import signal
import subprocess
import sys
import time
from contextlib import closing, suppress
from pathlib import Path

import pytest
from live_processes import command_lines, wait_for, wait_until_gone
from sandboxes_here import BOTH, folder_here

from tree_rl.rollout.sandbox.files.trees import remove_tree
from tree_rl.rollout.sandbox.ownership import MAKING, PREFIX, OwnedFolder, remove_left_over_folders
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


def test_what_cannot_be_removed_is_logged_and_passed_over(temporary: Path, caplog: pytest.LogCaptureFixture) -> None:
    left = temporary / f"{PREFIX}sandbox-left"
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
        for path in (*temporary.rglob("file"), *temporary.rglob("stays")):
            chattr("-i", path)
        for path in tuple(temporary.iterdir()):
            assert remove_tree(path)


def test_a_folder_that_is_a_link_or_gone_is_no_error(tmp_path: Path) -> None:
    (tmp_path / "precious").mkdir()
    (tmp_path / "precious/file").write_text("x")
    (tmp_path / "link").symlink_to(tmp_path / "precious")
    assert not remove_tree(tmp_path / "link")
    assert remove_tree(tmp_path / "missing")
    assert (tmp_path / "precious/file").read_text() == "x"


@pytest.mark.parametrize(
    ("place", "home", "killed", "older_by"),
    [
        *(("a", "b", True, 0), ("a/deep", "b", True, 0), ("b", "a", True, 0), ("b", "a/deep", True, 0)),
        *(("b", "aa", False, 0), ("a", "a", False, 60)),
    ],
)
def test_young_processes_are_found_by_folder_and_home(
    tmp_path: Path, place: str, home: str, killed: bool, older_by: float
) -> None:
    for name in ("a/deep", "aa", "b"):
        (tmp_path / name).mkdir(parents=True)
    since = time.time() + older_by
    environment = {"LEFT": "1", "HOME": str(tmp_path / home), "RIGHT": "1"}
    process = subprocess.Popen(["sleep", "500"], cwd=tmp_path / place, env=environment)
    try:
        kill_processes_in(tmp_path / "a", since=since)
        with suppress(subprocess.TimeoutExpired):
            process.wait(timeout=0.5)
        assert bool(process.returncode) == killed
    finally:
        process.kill()
        process.wait()


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


OWNER = """
import sys
from tree_rl.rollout.sandbox.sandbox_folder import SandboxFolder
sandbox = SandboxFolder({"a.txt": "alpha"}, unconfined=sys.argv[1] == "unconfined")
print(sandbox.directory.parent, flush=True)
sandbox.run(f"mkdir locked && chmod 0 locked; sleep {sys.argv[2]} & sleep {sys.argv[2]}")
"""


def sleepers(seconds: str) -> int:
    return command_lines().count(f"sleep {seconds} ")


@pytest.mark.parametrize("unconfined", BOTH)
@pytest.mark.usefixtures("temporary")
def test_a_killed_owner_leaves_no_process_and_no_folder(unconfined: bool) -> None:
    # An odd number of seconds tells these sleeps from all others.
    seconds = f"300.{os.getpid()}{int(unconfined)}"
    argv = [sys.executable, "-c", OWNER, "unconfined" if unconfined else "", seconds]
    owner = subprocess.Popen(argv, stdout=subprocess.PIPE, text=True)
    assert owner.stdout is not None
    folder = Path(owner.stdout.readline().strip())
    wait_for(lambda: sleepers(seconds) == 2)
    assert remove_left_over_folders() == [] and sleepers(seconds) == 2 and folder.is_dir()

    owner.send_signal(signal.SIGKILL)
    owner.wait()
    owner.stdout.close()
    if not unconfined:
        wait_for(lambda: not sleepers(seconds))
    assert remove_left_over_folders() == [folder]
    wait_for(lambda: not sleepers(seconds))
    assert not folder.exists()


def test_the_next_process_that_needs_a_sandbox_sweeps(temporary: Path) -> None:
    for does, left in (
        ("ownership import OwnedFolder; OwnedFolder('x')", 1),
        ("sandbox_folder import SandboxFolder; SandboxFolder().close()", 0),
    ):
        subprocess.run([sys.executable, "-c", f"from tree_rl.rollout.sandbox.{does}"], check=True)
        assert len(list(temporary.iterdir())) == left


def test_folders_of_living_owners_of_others_and_links_stay(temporary: Path, tmp_path: Path) -> None:
    with closing(OwnedFolder("sandbox")) as owned, closing(SandboxFolder()) as sandbox:
        (tmp_path / "precious").mkdir()
        (temporary / f"{PREFIX}sandbox-link").symlink_to(tmp_path / "precious")
        fresh = temporary / f"{PREFIX}{MAKING}sandbox-fresh"
        fresh.mkdir()
        (temporary / "sandbox-of-somebody").mkdir()
        assert remove_left_over_folders() == []
        assert owned.path.is_dir() and sandbox.directory.is_dir() and (tmp_path / "precious").is_dir()
        os.utime(fresh, (0, 0))
        assert remove_left_over_folders() == [fresh]
        (temporary / f"{PREFIX}sandbox-link").unlink()
