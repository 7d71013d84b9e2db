"""The Triton kernels compile, for Hopper and Ampere, on a machine without a GPU, and their tiles fit shared memory.

The interpreter does not check types as the compiler does. It is switched on in this process, so another one compiles.
"""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("triton", reason="Triton is not installed")

KIBI = 1024
SHARED_MEMORY = {90: 227 * KIBI, 80: 99 * KIBI}  # 99 KiB: Ada and the smaller Ampere


@pytest.mark.parametrize(
    ("capability", "head_size"),
    [(90, 128), *(pytest.param(*one, marks=pytest.mark.slow) for one in ((90, 256), (80, 128)))],
)
def test_kernels_with_every_option_compile_and_fit(capability: int, head_size: int) -> None:
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    tests = Path(__file__).parent
    environment["PYTHONPATH"] = os.pathsep.join([str(tests), str(tests.parent)])
    done = subprocess.run(
        [sys.executable, "-m", "compile_triton_kernels", str(capability), str(head_size)],
        env=environment,
        capture_output=True,
        text=True,
        timeout=280,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    shared = json.loads(done.stdout.splitlines()[-1])
    assert len(shared) >= 4
    assert all(0 <= used <= SHARED_MEMORY[capability] for used in shared.values()), shared
