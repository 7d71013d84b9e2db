"""The dtype in which every op sums: one rule for all."""

import torch


def accumulation_dtype(dtype: torch.dtype) -> torch.dtype:
    """float64 for float64, float32 for all else."""
    return torch.float64 if dtype == torch.float64 else torch.float32
