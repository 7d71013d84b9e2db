"""Kernels of Triton, compiled on a machine without a GPU, where the interpreter is switched off."""

import json
import os
import subprocess
import sys
from pathlib import Path

KIBI = 1024
SHARED_MEMORY = {90: 227 * KIBI, 80: 99 * KIBI}
"""By compute capability; 99 KiB: Ada and the smaller Ampere."""


def compiled_elsewhere(capability: int, *arguments: object) -> dict[str, int]:
    """Shared memory of each kernel that `compile_kernels` compiles in a process of its own; all fit."""
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    tests = Path(__file__).parent
    environment["PYTHONPATH"] = os.pathsep.join([str(tests), str(tests.parent)])
    command = [sys.executable, "-m", "compile_kernels", *map(str, (capability, *arguments))]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=280)
    assert done.returncode == 0, done.stderr[-3000:]
    shared: dict[str, int] = json.loads(done.stdout.splitlines()[-1])
    assert all(0 <= used <= SHARED_MEMORY[capability] for used in shared.values()), shared
    return shared
