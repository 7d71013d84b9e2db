"""The Triton kernels compile, for Hopper and Ampere, on a machine without a GPU, and their tiles fit shared memory.

The interpreter does not check types as the compiler does. It is switched on in this process, so another one compiles.
"""

import pytest

pytest.importorskip("triton", reason="Triton is not installed")

from compiled_kernels import compiled_elsewhere


@pytest.mark.parametrize(
    ("capability", "head_size"),
    [(90, 128), *(pytest.param(*one, marks=pytest.mark.slow) for one in ((90, 256), (80, 128)))],
)
def test_kernels_with_every_option_compile_and_fit(capability: int, head_size: int) -> None:
    assert len(compiled_elsewhere("compile_triton_kernels", capability, head_size)) >= 4
