"""A killed process leaves no command running and no sandbox behind."""

import os
import signal
import subprocess
import sys
import tempfile
from contextlib import closing
from pathlib import Path

import pytest
from live_processes import command_lines, wait_for
from sandboxes_here import BOTH

from tree_rl.rollout.sandbox.ownership import MAKING, PREFIX, OwnedFolder, remove_left_over_folders
from tree_rl.rollout.sandbox.sandbox_folder import SandboxFolder

OWN = "from tree_rl.rollout.sandbox.ownership import OwnedFolder"
OWNER = """
import sys
from tree_rl.rollout.sandbox.sandbox_folder import SandboxFolder
sandbox = SandboxFolder({"a.txt": "alpha"}, unconfined=sys.argv[1] == "unconfined")
print(sandbox.directory.parent, flush=True)
sandbox.run(f"mkdir locked && chmod 0 locked; sleep {sys.argv[2]} & sleep {sys.argv[2]}")
"""


@pytest.fixture(autouse=True)
def temporary(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A directory for temporary files of this test alone, which commands of any user may enter."""
    folder = Path(tempfile.mkdtemp(prefix="owners-", dir="/tmp"))
    folder.chmod(0o1777)
    monkeypatch.setenv("TMPDIR", str(folder))
    monkeypatch.setattr(tempfile, "tempdir", str(folder))
    yield folder
    for path in folder.iterdir():
        path.rmdir()
    folder.rmdir()


def sleepers(seconds: str) -> int:
    return command_lines().count(f"sleep {seconds} ")


@pytest.mark.parametrize("unconfined", BOTH)
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
    left = subprocess.run(
        [sys.executable, "-c", f"{OWN}\nprint(OwnedFolder('x').path)"], capture_output=True, text=True, check=True
    ).stdout.strip()
    assert Path(left).is_dir()
    program = "from tree_rl.rollout.sandbox.sandbox_folder import SandboxFolder\nSandboxFolder().close()"
    subprocess.run([sys.executable, "-c", program], check=True)
    assert list(temporary.iterdir()) == []


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
