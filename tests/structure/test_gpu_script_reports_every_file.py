"""scripts/test_gpu.sh: one process per file, one log; here with tests of a marker that need no GPU."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

ROOT = Path(__file__).parents[2]
SCRIPT = ROOT / "scripts" / "test_gpu.sh"
PASSES = "import pytest\n@pytest.mark.gpu\ndef test_a(): assert {first} + 1 == 2\ndef test_unmarked(): assert False\n"


def bash(command: str, folder: Path) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        ["bash", "-c", f"source {SCRIPT}; {command}"],
        cwd=folder,
        env={**os.environ, "PYTHON": sys.executable, "COMMIT": "abc1234"},
        capture_output=True,
        text=True,
        timeout=200,
    )


@pytest.mark.parametrize("jobs", [1, 3])
def test_the_log_says_what_ran_and_what_failed(jobs: int, tmp_path: Path) -> None:
    (tmp_path / "pytest.ini").write_text("[pytest]\nmarkers = gpu: of this test\n")
    for name, first in (("test_right.py", 1), ("test_wrong.py", 7), ("test_also_right.py", 1)):
        (tmp_path / name).write_text(PASSES.format(first=first))
    (tmp_path / "test_other.py").write_text("def test_nothing(): assert False\n")
    command = f"files=$(gpu_files gpu); gpu_describe > log; GPU_JOBS={jobs} gpu_run_files gpu log $files"
    done = bash(command, tmp_path)
    assert done.returncode == 1, done.stderr
    log = (tmp_path / "log").read_text()
    assert "commit: abc1234" in log and f"torch: {torch.__version__.split('+')[0]}" in log
    sections = [section.splitlines() for section in log.split("\n== ")[1:]]
    assert sorted(section[0] for section in sections) == ["test_also_right.py", "test_right.py", "test_wrong.py"]
    if jobs == 1:
        assert [section[0] for section in sections] == sorted(section[0] for section in sections)
    for name, *lines in sections:
        told = "1 failed, 1 deselected" if name == "test_wrong.py" else "1 passed, 1 deselected"
        assert sum(told in line for line in lines) == 1, "a section is one piece"
    assert log.count("1 passed, 1 deselected") == 2 and log.count("1 failed, 1 deselected") == 1
    assert "FAILED test_wrong.py::test_a" in log and log.endswith("3 files, 1 failed\n")


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a CUDA device")
def test_without_a_gpu_it_says_what_is_missing_and_writes_nothing(tmp_path: Path) -> None:
    done = bash("gpu_main log", tmp_path)
    assert done.returncode == 2 and "needs a CUDA device that torch sees, found none" in done.stderr
    assert not (tmp_path / "log").exists()
