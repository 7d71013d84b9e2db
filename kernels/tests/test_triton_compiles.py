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

SLOW = (
    *((90, "attention", 256, 256), (80, "attention", 128, 128), (90, "attention", 192, 128)),
    *((80, "attention", 192, 128), *((at, "delta", dtype) for at in (90, 80) for dtype in ("bfloat16", "float16"))),
)
"""Capability, then head size of keys and of values, or dtype."""


@pytest.mark.parametrize(
    "target", [(90, "attention", 128, 128), *(pytest.param(one, marks=pytest.mark.slow) for one in SLOW)]
)
def test_kernels_with_every_option_compile_and_fit(target: tuple[object, ...]) -> None:
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    tests = Path(__file__).parent
    environment["PYTHONPATH"] = os.pathsep.join([str(tests), str(tests.parent)])
    command = [sys.executable, "-m", "compile_kernels", *map(str, target)]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=280)
    assert done.returncode == 0, done.stderr[-3000:]
    assert len(json.loads(done.stdout.splitlines()[-1])) == (5 if "attention" in target else 13)
