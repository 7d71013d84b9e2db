"""An output is there whole or not at all; a full, closed or forbidden one ends in one line with exit code 2."""

import os
import stat
import subprocess
import sys
from pathlib import Path

import pytest
from fixture_types import Printed, Refused, Run

from tree_rl.benchmark.results import write_csv
from tree_rl.inspection.files import InputError
from tree_rl.inspection.files.writing import require_writable_folder, write_whole

TREE_RL = [sys.executable, "-c", "from tree_rl.cli import main; main()"]
NOBODY = 65534


LOG = '{"step": 1, "data": {"timing_s/step": 1.0}}\n'


def written(path: Path, text: str) -> Path:
    path.write_text(text)
    return path


@pytest.fixture
def rows(tmp_path: Path) -> Path:
    return written(tmp_path / "rows.json", '[{"input_ids": [1, 2], "uid": "a"}, {"input_ids": [1, 3], "uid": "a"}]')


def test_a_drawing_that_cannot_be_written_leaves_nothing(tmp_path: Path, rows: Path, tree_rl: Run) -> None:
    folder = tmp_path / "folder"
    folder.mkdir()
    os.mkfifo(tmp_path / "pipe")
    for target, message in {
        "/dev/full": "/dev/full: expected a file that can be written: No space left on device",
        str(folder): "expected a file to write, received a folder",
        str(tmp_path / "pipe"): "expected a file that can be written",
        str(rows / "under" / "a.svg"): "found no folder",
        "/proc/1/a.svg": "expected a file that can be written",
        str(tmp_path / ("n" * 300)): "File name too long",
        str(tmp_path / "\x1b[31m\n" / "a"): "\\x1b[31m\\n",
    }.items():
        # The table may be there already.
        code, _, err = tree_rl("inspect", rows, "--draw", "svg", target)
        assert code == 2 and message in err and err.endswith("\n") and err[:-1].isprintable(), err
    assert stat.S_ISCHR(os.stat("/dev/full").st_mode)
    assert list(folder.iterdir()) == []


@pytest.mark.parametrize(
    ("redirected", "argument", "said"),
    [
        ('"$@" >/dev/full', "inspect", "No space left on device"),
        ('"$@" >/dev/full', "--help", "No space left on device"),
        ('"$@" >&-', "inspect", "but it is closed"),
        # A pipe whose reader has left.
        ('exec 3> >(:); sleep 0.3; "$@" >&3', "inspect", "expected to write the whole result: Broken pipe"),
    ],
)
def test_a_standard_output_that_takes_nothing_is_told(rows: Path, redirected: str, argument: str, said: str) -> None:
    command = ["bash", "-c", redirected, "bash", *TREE_RL, argument, str(rows)]
    ended = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)
    assert ended.returncode == 2 and said in ended.stderr, ended
    assert ended.stderr.endswith("\n") and ended.stderr[:-1].isprintable(), ended.stderr


def test_a_terminal_of_another_encoding_shows_escapes(rows: Path) -> None:
    command, environment = [*TREE_RL, "inspect", str(rows), "--draw", "text", "-"], {"PYTHONIOENCODING": "latin-1"}
    ended = subprocess.run(command, capture_output=True, timeout=120, check=False, env=os.environ | environment)
    assert (ended.returncode, ended.stderr) == (0, b"")
    assert b"\\u251c\\u2500 1 x1" in ended.stdout


def test_a_failure_keeps_the_old_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    target = written(tmp_path / "figure.csv", "old")

    def full(*paths: object) -> None:
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as patched:
        patched.setattr(os, "replace", full)
        with pytest.raises(InputError, match="No space left"):
            write_csv(target, [{"a": 1}])
    assert target.read_text() == "old"
    assert list(tmp_path.iterdir()) == [target]
    write_csv(target, [{"a": 1}])
    assert target.read_text() == "a\n1\n"
    assert list(tmp_path.iterdir()) == [target]


def test_mode_and_link_of_the_old_file_stay(tmp_path: Path) -> None:
    target, link = written(tmp_path / "target", "old"), tmp_path / ("n" * 255)
    target.chmod(0o640)
    link.symlink_to(target)
    write_whole(link, b"new")
    assert link.is_symlink() and target.read_bytes() == b"new"
    assert stat.S_IMODE(target.stat().st_mode) == 0o640
    write_whole(tmp_path / "new" / "folder" / "file", b"made")
    assert (tmp_path / "new" / "folder" / "file").read_bytes() == b"made"


@pytest.mark.skipif(os.geteuid() != 0, reason="takes another user's view")
def test_what_another_user_may_not_write_stays(tmp_path: Path) -> None:
    read_only, closed = written(tmp_path / "read_only", "old"), tmp_path / "closed"
    read_only.chmod(0o444)
    closed.mkdir(mode=0o555)
    for folder in (tmp_path, *tmp_path.parents[:3]):
        folder.chmod(folder.stat().st_mode | 0o005)
    tmp_path.chmod(0o777)
    os.setresuid(NOBODY, NOBODY, 0)
    try:
        for path in (read_only, closed / "file", closed / "folder" / "file"):
            with pytest.raises(InputError, match="Permission denied"):
                write_whole(path, b"new")
        with pytest.raises(InputError, match="--out"):
            require_writable_folder(closed, "--out")
    finally:
        os.setresuid(0, 0, 0)
    assert read_only.read_text() == "old" and list(closed.iterdir()) == []


def test_folders_of_results_are_tried_before_the_work(tmp_path: Path, rows: Path, refused: Refused) -> None:
    refused(f"--out {rows}: expected a folder that can be written", "bench", "--model", "tiny", "--out", rows)
    refused(f"--cache {rows}: expected a folder that can be written", "precompile", "--cache", rows)
    assert rows.read_text().startswith("[")
    new = tmp_path / "new"
    require_writable_folder(new, "--out")
    assert not new.exists()
    with pytest.raises(InputError, match="File name too long"):
        write_whole(new / ("n" * 300), b"x")
    assert not new.exists()


def test_no_folder_is_made_for_a_path_with_a_typo(tmp_path: Path, rows: Path, refused: Refused) -> None:
    log = written(tmp_path / "metrics.jsonl", LOG)
    before = sorted(tmp_path.iterdir())
    folder = tmp_path / "no" / "such"
    for option, given in {
        "--draw": ("inspect", rows, "--draw", "svg", folder / "a.svg"),
        "--out": ("report", log, "--out", folder / "a.html"),
        "--html": ("view", rows, "--html", folder / "a.html"),
        "recipes": ("recipes", folder / "recipes"),
        "--cache": ("precompile", "--cache", folder / "cache"),
    }.items():
        refused(f"{option} {given[-1]}: expected a path in a folder that exists, found no folder {folder}", *given)
    refused(f"--out {folder}/bench: expected a path in a folder", "bench", "--model", "tiny", "--out", folder / "bench")
    assert sorted(tmp_path.iterdir()) == before


def test_a_page_replaces_no_data(tmp_path: Path, rows: Path, refused: Refused, printed: Printed) -> None:
    log = written(tmp_path / "metrics.jsonl", LOG)
    console = written(tmp_path / "console.log", "step:1 - timing_s/step:1.0\n")
    before = {path: path.read_bytes() for path in tmp_path.iterdir()}
    for option, taken, *given in (
        ("--draw", rows, "inspect", rows, "--draw", "svg", rows),
        ("--out", console, "report", console, "--out", console),
        # As a shell expands `--html *.json*` of two files.
        ("--html", log, "view", "--html", log, rows),
    ):
        refused(f"{option} {taken}: expected a place for the page", *given)
    assert {path: path.read_bytes() for path in tmp_path.iterdir()} == before
    for _ in range(2):
        printed("view", rows, "--html", tmp_path / "page.html")
