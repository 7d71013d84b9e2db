"""A recipe as a user runs it, in a folder of its own."""

import os
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path


def run(command: Sequence[str | Path], folder: Path, **variables: str) -> str:
    """What it prints. Fails if it ends with another status than 0."""
    own = {"PYTHON": sys.executable, "HF_HUB_OFFLINE": "1", "RAY_TMPDIR": "/tmp"}
    finished = subprocess.run(
        command, env=os.environ | own | variables, cwd=folder, capture_output=True, text=True, timeout=860, check=False
    )
    assert finished.returncode == 0, finished.stdout[-3000:] + finished.stderr[-3000:]
    return finished.stdout
