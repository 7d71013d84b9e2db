"""Liger's kernels on a CPU: what Triton's interpreter lacks to run them. It must be on before Triton is imported."""

import importlib.util
from typing import Any

import numpy as np
import pytest
import torch


def interpret_liger(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let this process run Liger's kernels as they are, or skip with the reason."""
    if importlib.util.find_spec("liger_kernel") is None:
        pytest.skip('liger-kernel is not installed; pip install "tree_rl[dev]"')
    if torch.cuda.is_available():
        pytest.skip("a GPU runs the kernels compiled: tests/models/test_fused_layers_on_gpu.py")
    monkeypatch.setenv("TRITON_INTERPRET", "1")
    import triton.language as tl
    from liger_kernel.ops import fused_moe_kernels, geglu, rms_norm
    from triton.runtime import interpreter

    kernels = (tl.standard.sum, rms_norm._rms_norm_forward_kernel)
    if not all(isinstance(kernel, interpreter.InterpretedFunction) for kernel in kernels):
        pytest.skip("Triton was imported before tests/conftest.py turned its interpreter on")
    assert fused_moe_kernels._AUTOTUNE_DISABLED, "the interpreter runs no kernel of several configurations"
    convert = interpreter._implicit_cvt

    def with_floats(argument: Any) -> Any:
        """The interpreter leaves floats as Python's, the compiler makes scalars of them."""
        if not isinstance(argument, float):
            return convert(argument)
        handle = interpreter.TensorHandle(np.array([argument], dtype=np.float32), tl.float32)
        return tl.tensor(handle, tl.float32)

    monkeypatch.setattr(interpreter, "_implicit_cvt", with_floats)
    # Both come from CUDA's library.
    monkeypatch.setattr(rms_norm, "rsqrt", lambda x: tl.rsqrt(x))
    monkeypatch.setattr(geglu, "tanh", lambda x: 2 * tl.sigmoid(2 * x) - 1)
