"""What this process writes, reads, copies and removes for a sandbox stays in it, whatever its commands swap."""

import os
import stat
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path

import pytest
from sandboxes_here import folder_here

from tree_rl.rollout.sandbox.files.trees import MAX_DEPTH, stays_inside
from tree_rl.rollout.sandbox.processes.limits import Limits
from tree_rl.rollout.sandbox.sandbox_folder import SandboxFolder


@pytest.fixture
def outside(open_folder: Path) -> Iterator[Path]:
    """A folder of the trainer, with a file that anybody may read but only the trainer may change."""
    canary = open_folder / "canary.txt"
    canary.write_text("untouched")
    canary.chmod(0o644)
    yield open_folder
    assert canary.read_text() == "untouched"
    assert canary.stat().st_uid == os.geteuid() and stat.S_IMODE(canary.stat().st_mode) == 0o644
    assert [path.name for path in open_folder.iterdir()] == ["canary.txt"]


@pytest.mark.parametrize("name", ["link", "folder/a.txt", "dangling", "dangling/a.txt"])
def test_links_are_refused_by_name(outside: Path, name: str) -> None:
    with closing(folder_here()) as sandbox:
        sandbox.run(f"ln -s {outside}/canary.txt link; ln -s {outside} folder; ln -s {outside}/none dangling")
        with pytest.raises(ValueError, match=r"sandbox path .* link"):
            sandbox.write(name, "x")


@pytest.mark.parametrize("name", ["a\0b", "\ud800", "x" * 256, "", ".", "a/../..", "/", "../" * 60 + "tmp/x"])
def test_names_that_are_no_paths_inside_are_refused(name: str) -> None:
    with closing(folder_here()) as sandbox, pytest.raises(ValueError, match="sandbox path"):
        sandbox.write(name, "x")


def test_what_a_write_finds_in_its_way() -> None:
    with closing(folder_here({"run.sh": "old"})) as sandbox:
        sandbox.run(
            "chmod 755 run.sh; mkdir taken; mkfifo pipe; ln run.sh twin; mkdir -p locked; chmod 0 locked run.sh"
        )
        sandbox.write("run.sh", "new")
        assert sandbox.run("cat run.sh; cat twin 2>&1").output.startswith("new")
        sandbox.write("locked/a.txt", "inside")
        assert sandbox.read("locked/a.txt") == "inside"
        for name in ("taken", "pipe"):
            with pytest.raises(ValueError, match="no regular file"):
                sandbox.write(name, "x")
        sandbox.write("text", "a\ud800b")
        assert sandbox.run("wc -c < text").output.strip() == "5"


def copied(source: SandboxFolder) -> dict[str, str]:
    """Files that a judge gets, by path; links as what they say."""
    source.stop()
    found = {}
    with closing(folder_here()) as judge:
        source.copy_to(judge, leave_out=lambda path: path.startswith("left/"))
        for folder, folders, files in os.walk(judge.directory):
            for name in (*folders, *files):
                path = Path(folder, name)
                status = path.lstat()
                if os.geteuid() == 0:
                    assert status.st_uid == judge._user_id, path
                assert not status.st_mode & 0o7000
                kept = str(path.relative_to(judge.directory))
                if stat.S_ISLNK(status.st_mode):
                    found[kept] = f"-> {path.readlink()}"
                elif stat.S_ISREG(status.st_mode):
                    assert status.st_nlink == 1
                    found[kept] = path.read_text()
    return found


def test_a_judge_gets_regular_files_and_links_that_stay_inside(outside: Path) -> None:
    with closing(folder_here({"src/a.py": "a", "left/b.py": "b"})) as sandbox:
        sandbox.run(
            "ln src/a.py src/twin; ln -s a.py src/near; ln -s ../src/a.py src/round; ln -s /etc/passwd far; "
            f"ln -s {outside}/canary.txt farther; ln -s ../../../etc/passwd up; ln -s src/../../x over; ln -s . self; "
            "mkfifo pipe; mkdir empty; echo s > src/run; chmod 4755 src/run; echo 0 > src/locked; chmod 0 src/locked; "
            "python3 -c 'import socket; socket.socket(socket.AF_UNIX).bind(\"socket\")'; "
            # `d/l -> ..` stays inside, and `x -> d/l/..` looks as if it did.
            "mkdir d; ln -s .. d/l; ln -s d/l/.. x"
        )
        assert copied(sandbox) == {
            "src/a.py": "a",
            "src/twin": "a",
            "src/near": "-> a.py",
            "src/round": "-> ../src/a.py",
            "src/run": "s\n",
            "src/locked": "0\n",
            "self": "-> .",
            "d/l": "-> ..",
        }


def test_what_the_agent_deleted_is_deleted_for_the_judge_too() -> None:
    files = {"a.py": "a", "old/b.py": "b", "left/b.py": "b", "turned": "file", "far": "x"}
    with closing(folder_here(files)) as sandbox, closing(folder_here(files)) as judge:
        judge.run("ln -s a.py link")
        sandbox.run("rm -r old left turned far; mkdir turned; echo c > turned/c; ln -s /etc/passwd far")
        sandbox.stop()
        sandbox.copy_to(judge, leave_out=lambda path: path.startswith("left/"))
        assert judge.run("find . ! -type d | sort").output.split() == ["./a.py", "./far", "./left/b.py", "./turned/c"]


@pytest.mark.parametrize(
    ("target", "depth", "inside"),
    [
        ("a", 0, True), ("../a", 1, True), ("../../a", 1, False), ("a/../b", 3, False), ("/a", 3, False),
        (".", 0, True), ("..", 0, False), ("./../a", 1, True), ("a/..", 1, False), ("", 1, False),
    ],
)  # fmt: skip
def test_a_link_stays_inside_if_nothing_climbs_after_a_name(target: str, depth: int, inside: bool) -> None:
    assert stays_inside(target, depth=depth) == inside


@pytest.mark.parametrize(
    "make",
    [
        "import os\nfor i in range(4000): open(f'f{i}', 'w').close()",
        "import os\nfor i in range(9):\n with open(f's{i}', 'wb') as f: os.truncate(f.fileno(), 1 << 20)",
        f"import os\nfor i in range({MAX_DEPTH + 5}): os.mkdir('d'); os.chdir('d')\nopen('x', 'w').close()",
    ],
    ids=["too many", "sparse", "too deep"],
)
def test_what_cannot_be_copied_is_a_mistake_of_the_agent(make: str) -> None:
    limits = Limits(disk_bytes=8 << 20, timeout_seconds=60, cpu_seconds=30)
    with closing(folder_here({"make.py": make}, limits=limits)) as sandbox:
        sandbox.run("python3 make.py")
        sandbox.stop()
        with closing(folder_here()) as judge, pytest.raises(ValueError, match=r"exceed|within each other"):
            sandbox.copy_to(judge, leave_out=lambda path: False)
