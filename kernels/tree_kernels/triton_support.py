"""Where our Triton kernels run. This file does not import Triton, so it works on any machine."""

import contextlib
import importlib.util
import os
from typing import Any

import torch

DTYPES = (torch.bfloat16, torch.float16, torch.float32)
OLDEST_CAPABILITY = (8, 0)
HOPPER = 9


def interpreted() -> bool:
    """True if Triton runs kernels in its CPU interpreter; Triton decides this when a kernel is defined."""
    return os.environ.get("TRITON_INTERPRET") == "1"


def triton_unavailable_reason(device: torch.device, dtype: torch.dtype, *, multiplies: bool = True) -> str | None:
    """Why our Triton kernels cannot run on this device and dtype, or None if they can.

    `multiplies` is True for kernels with matrix products, which do not run on GPUs before Ampere, nor in bfloat16 in
    the interpreter.
    """
    if importlib.util.find_spec("triton") is None:
        return 'triton is not installed; pip install "tree_rl[gpu]"'
    if dtype not in DTYPES:
        return f"the Triton kernels need one of {DTYPES}, received {dtype}"
    if interpreted():
        # The interpreter computes bfloat16 products on their bit patterns.
        is_wrong = multiplies and dtype == torch.bfloat16
        return "Triton's CPU interpreter (TRITON_INTERPRET=1) is wrong in bfloat16" if is_wrong else None
    if device.type != "cuda":
        return f"the Triton kernels need a CUDA device (or TRITON_INTERPRET=1 for a test), received {device}"
    if multiplies and torch.cuda.is_available() and torch.cuda.get_device_capability(device) < OLDEST_CAPABILITY:
        major, minor = torch.cuda.get_device_capability(device)
        return f"the Triton kernels need compute capability 8.0 (Ampere) or later, the device has {major}.{minor}"
    return None


def launch_device(device: torch.device) -> contextlib.AbstractContextManager[Any]:
    """Context that makes the tensors' device current, because Triton launches on the current device."""
    return torch.cuda.device(device) if device.type == "cuda" else contextlib.nullcontext()
