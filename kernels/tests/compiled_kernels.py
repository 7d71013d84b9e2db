"""Kernels of Triton, compiled on a machine without a GPU, where the interpreter is switched off."""

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

KIBI = 1024
SHARED_MEMORY = {90: 227 * KIBI, 80: 99 * KIBI}
"""By compute capability; 99 KiB: Ada and the smaller Ampere."""


def shared_memory(
    kernel: Any, types: dict[str, str], constants: dict[str, Any], capability: int, *, warps: int, stages: int
) -> int:
    """Bytes that one compiled kernel takes; its pointers are multiples of 16."""
    aligned = {
        (index,): [["tt.divisibility", 16]]
        for index, name in enumerate(kernel.arg_names)
        if name.endswith("_pointer") and name not in constants
    }
    source = ASTSource(kernel, types, constants, aligned)
    options = {"num_warps": warps, "num_stages": stages}
    return triton.compile(source, target=GPUTarget("cuda", capability, 32), options=options).metadata.shared


def compiled_elsewhere(module: str, capability: int, *arguments: object) -> dict[str, int]:
    """Shared memory of each kernel that a module of this folder compiles in a process of its own; all fit."""
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    tests = Path(__file__).parent
    environment["PYTHONPATH"] = os.pathsep.join([str(tests), str(tests.parent)])
    command = [sys.executable, "-m", module, str(capability), *map(str, arguments)]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=280)
    assert done.returncode == 0, done.stderr[-3000:]
    shared: dict[str, int] = json.loads(done.stdout.splitlines()[-1])
    assert all(0 <= used <= SHARED_MEMORY[capability] for used in shared.values()), shared
    return shared
