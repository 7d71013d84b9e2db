"""The arrows between layers, lazy imports included, as pyproject.toml states them."""

import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[2]


def test_import_contracts_are_kept() -> None:
    command = [str(Path(sys.executable).with_name("lint-imports")), "--no-cache"]
    finished = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=120, check=False)
    assert finished.returncode == 0, finished.stdout
    assert "0 broken" in finished.stdout
