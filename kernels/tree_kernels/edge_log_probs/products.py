"""Matrix products of half-precision factors with float32 accumulation."""

from collections.abc import Iterator
from contextlib import contextmanager

import torch

LONGEST_SUM = 4096
"""Most columns that one product of half-precision factors sums into a logit, because tensor cores truncate partial sums
instead of rounding them. Without a split, log-probs of logits with a spread of 3 are wrong by 2.2e-5 at 1,024 columns,
8.8e-5 at 4,096 and more than 1e-4 at 5,120 (H200)."""
LONGEST_SUM_BESIDE_TARGETS = 5120
"""Most columns if the logits of targets are recomputed without tensor cores: the error is 8.3e-5 at 4,096 columns,
8.0e-5 at 5,120 and 1.2e-4 at 8,192, or 6.8e-5 there in two parts."""


def logits_of(
    hidden_UC: torch.Tensor,
    weight_vC: torch.Tensor,
    dtype: torch.dtype,
    *,
    longest_sum: int,
    out: torch.Tensor | None = None,
) -> torch.Tensor:
    """hidden @ weight.T in `dtype`; long sums are split into even parts, so that partial sums are rounded.

    Args:
        hidden_UC: [U, C].
        weight_vC: [v, C] in the same dtype.
        dtype: the factors' dtype, or float32.
        longest_sum: most columns of a part.
        out: [U, v] in `dtype`, written and returned.
    """
    parts = 1 if hidden_UC.dtype == dtype else -(-hidden_UC.shape[1] // longest_sum)
    first, *rest = zip(hidden_UC.chunk(parts, dim=1), weight_vC.chunk(parts, dim=1), strict=True)
    logits_Uv = product(first[0], first[1].T, dtype, out=out)
    for hidden_Uc, weight_vc in rest:
        add_product(hidden_Uc, weight_vc.T, out=logits_Uv)
    return logits_Uv


def product(a: torch.Tensor, b: torch.Tensor, dtype: torch.dtype, out: torch.Tensor | None = None) -> torch.Tensor:
    """a @ b, accumulated and returned in `dtype` (the factors' or float32); on CUDA the factors are not converted.

    `out` [M, N] in `dtype` is written and returned if given.
    """
    if a.dtype == b.dtype == dtype:
        return torch.mm(a, b, out=out)
    if _mixes(a, b):
        return torch.mm(a, b, out_dtype=dtype) if out is None else torch.mm(a, b, out_dtype=dtype, out=out)
    return torch.mm(a.to(dtype), b.to(dtype), out=out)


def add_product(a: torch.Tensor, b: torch.Tensor, out: torch.Tensor) -> None:
    """out += a @ b without a second [M, N] tensor."""
    if _mixes(a, b) and a.dtype != out.dtype:
        torch.addmm(out, a, b, out_dtype=out.dtype, out=out)
    else:
        torch.addmm(out, a.to(out.dtype), b.to(out.dtype), out=out)


def write_rounded_product(a: torch.Tensor, b: torch.Tensor, out: torch.Tensor) -> None:
    """out = a @ b, accumulated in float32 and rounded once to the dtype of `out`."""
    if out.dtype == torch.float32 or not _mixes(a, b):
        out.copy_(product(a, b, torch.float32))
        return
    with _partial_sums_in_float32():
        torch.mm(a, b, out=out)


@contextmanager
def _partial_sums_in_float32() -> Iterator[None]:
    """Make cuBLAS add the parts of sums that it splits in float32; by default it may use the output's dtype."""
    settings = torch.backends.cuda.matmul
    names = ("allow_bf16_reduced_precision_reduction", "allow_fp16_reduced_precision_reduction")
    before = [getattr(settings, name) for name in names]
    try:
        for name in names:
            setattr(settings, name, False)
        yield
    finally:
        for name, value in zip(names, before, strict=True):
            setattr(settings, name, value)


def _mixes(a: torch.Tensor, b: torch.Tensor) -> bool:
    """True if `torch.mm` can multiply these factors into a float32 product."""
    return a.device.type == "cuda" and a.dtype == b.dtype
