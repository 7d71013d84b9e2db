"""The Triton kernels compile, for Hopper and Ampere, on a machine without a GPU, and their tiles fit shared memory.

The interpreter does not check types as the compiler does. It is switched on in this process, so another one compiles.
"""

import pytest

pytest.importorskip("triton", reason="Triton is not installed")

from compiled_kernels import compiled_elsewhere

SLOW = ((90, 256, 256), (80, 128, 128), (90, 192, 128), (80, 192, 128))
"""Capability, head size of keys and of values."""


@pytest.mark.parametrize("target", [(90, 128, 128), *(pytest.param(one, marks=pytest.mark.slow) for one in SLOW)])
def test_kernels_with_every_option_compile_and_fit(target: tuple[int, int, int]) -> None:
    assert len(compiled_elsewhere(target[0], "attention", *target[1:])) >= 4
