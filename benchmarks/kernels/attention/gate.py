"""The gate before every timing: outputs and gradients of a small tree of the same shape against the reference."""

from dataclasses import dataclass

import torch
from contenders import Contender
from shapes import HeadLayout

from tree_kernels import tree_attention

LIMIT = {torch.bfloat16: 2.0**-8, torch.float16: 2.0**-11, torch.float32: 1e-5}
"""Largest relative error (norm). Half precision: the distance of neighbouring numbers. Inputs are exact, and rounding
the probabilities and the result costs about half of that; an error in the mask costs far more."""


class GateError(RuntimeError):
    """A contender computes something else; its time would mean nothing."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Errors:
    """Relative norms of the errors."""

    out: float
    dq: float
    dk: float
    dv: float

    @property
    def largest(self) -> float:
        """The worst of the four; NaN if any is."""
        values = torch.tensor([self.out, self.dq, self.dk, self.dv])
        return float(values.max())


def check(contender: Contender, heads: HeadLayout, dtype: torch.dtype) -> Errors:
    """Compare one contender with the reference.

    Args:
        contender: of a small forest: the reference holds all scores.
        heads: of q, k and v.
        dtype: of q, k and v; the reference computes in float32 from the same numbers.

    Raises:
        GateError: an error beyond `LIMIT`.
    """
    leaves, grad = inputs_of(contender.tokens, heads, dtype, contender.subtree_end.device)
    out = contender.run(*leaves)
    got = [out.detach(), *torch.autograd.grad(out, leaves, grad)]
    exact = [leaf.detach().float().requires_grad_() for leaf in leaves]
    truth_out = tree_attention(*exact, contender.subtree_end, impl="reference")
    assert isinstance(truth_out, torch.Tensor)
    truth = [truth_out.detach(), *torch.autograd.grad(truth_out, exact, grad.float())]
    relative = [float((g.float() - t).norm() / t.norm()) for g, t in zip(got, truth, strict=True)]
    errors = Errors(out=relative[0], dq=relative[1], dk=relative[2], dv=relative[3])
    if not errors.largest <= LIMIT[dtype]:
        raise GateError(f"{contender.name}: expected errors of at most {LIMIT[dtype]:.2g}, received {errors}")
    return errors


def inputs_of(
    tokens: int, heads: HeadLayout, dtype: torch.dtype, device: torch.device
) -> tuple[list[torch.Tensor], torch.Tensor]:
    """Normal q [N, H, D], k and v as leaves, and a gradient of the output."""
    torch.manual_seed(0)
    counts = (heads.heads, heads.kv_heads, heads.kv_heads, heads.heads)
    q, k, v, grad = (torch.randn(tokens, count, heads.head_size, dtype=dtype, device=device) for count in counts)
    return [t.requires_grad_() for t in (q, k, v)], grad
