"""Where the processes of a run find their modules, and how all of them end."""

import os
import signal
from dataclasses import replace
from pathlib import Path

from quickstart.progress import Phase, run_phase

REPOSITORY = Path(__file__).resolve().parents[2]
MARK = "TREE_RL_WHOLE_STEP"
"""Variable by which the processes of a run are found."""


def python_path() -> str:
    """Where every process finds the packages."""
    own = [str(REPOSITORY / name) for name in ("", "kernels", "benchmarks", "recipes")]
    return os.pathsep.join(path for path in (*own, os.environ.get("PYTHONPATH", "")) if path)


def run_to_the_end(phase: Phase) -> None:
    """Run a phase, then end what outlives it, such as a vLLM engine whose server was killed."""
    mark = f"{os.getpid()}-{phase.name}"
    try:
        run_phase(replace(phase, environment={**(phase.environment or {}), MARK: mark}))
    finally:
        wanted = f"{MARK}={mark}".encode()
        for folder in Path("/proc").glob("[0-9]*"):
            try:
                if wanted in (folder / "environ").read_bytes().split(b"\0"):
                    os.kill(int(folder.name), signal.SIGKILL)
            except OSError:
                continue
