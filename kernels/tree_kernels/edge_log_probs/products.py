"""Matrix products of half-precision factors that are summed and returned in float32."""

import torch


def product(a: torch.Tensor, b: torch.Tensor, dtype: torch.dtype, out: torch.Tensor | None = None) -> torch.Tensor:
    """a @ b summed and returned in `dtype`; on CUDA half-precision factors stay as they are.

    Args:
        a: [M, K].
        b: [K, N] in the dtype of `a`.
        dtype: that of the factors, or float32.
        out: [M, N] in `dtype`, written and returned.
    """
    if a.dtype == b.dtype == dtype:
        return torch.mm(a, b, out=out)
    if _mixes(a, b):
        return torch.mm(a, b, out_dtype=dtype) if out is None else torch.mm(a, b, out_dtype=dtype, out=out)
    return torch.mm(a.to(dtype), b.to(dtype), out=out)


def add_product(total: torch.Tensor, a: torch.Tensor, b: torch.Tensor) -> None:
    """total += a @ b inside the product, without a second [M, N] tensor."""
    if _mixes(a, b) and a.dtype != total.dtype:
        torch.addmm(total, a, b, out_dtype=total.dtype, out=total)
    else:
        torch.addmm(total, a.to(total.dtype), b.to(total.dtype), out=total)


def _mixes(a: torch.Tensor, b: torch.Tensor) -> bool:
    """Whether factors of this dtype can be multiplied into a float32 product."""
    return a.device.type == "cuda" and a.dtype == b.dtype
