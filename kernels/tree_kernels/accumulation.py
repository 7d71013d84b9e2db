"""The dtypes in which operations accumulate, and in which they read their inputs."""

import torch


def accumulation_dtype(dtype: torch.dtype) -> torch.dtype:
    """float64 for float64, else float32."""
    return torch.float64 if dtype == torch.float64 else torch.float32


def in_autocast_dtype(t: torch.Tensor) -> torch.Tensor:
    """Under autocast, cast as torch does for its own operations; float64 is not cast."""
    if not torch.is_autocast_enabled(t.device.type) or t.dtype == torch.float64:
        return t
    return t.to(torch.get_autocast_dtype(t.device.type))
