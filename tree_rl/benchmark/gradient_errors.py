"""The gate before every figure: no time is measured while the tree's gradient is wrong."""

from collections.abc import Sequence
from dataclasses import dataclass

import torch

NOISE = 1.1
"""The tree's error may be this many times the rows' error: two runs that round alike differ by less."""
FLOAT32_LIMIT = 1e-5
"""A relative error that always passes: float32 rounding."""


class GateError(RuntimeError):
    """The tree's gradient is further from the yardstick than the rows' gradient."""


@dataclass(frozen=True, kw_only=True, slots=True)
class GradientErrors:
    """Relative errors of both gradients against rows in higher precision, over all parameters."""

    tree: float
    rows: float
    rows_apart: float = 0.0
    """Error of rows of the same lengths that hardly share a prefix; 0 if it was not measured."""

    @property
    def limit(self) -> float:
        """The largest error of the tree that passes."""
        return max(NOISE * self.rows, NOISE * self.rows_apart, FLOAT32_LIMIT)

    def require_exact(self, rows_name: str) -> "GradientErrors":
        """These errors, if the tree passes; a `GateError` that calls the other side `rows_name` if it does not."""
        if not self.tree <= self.limit:
            apart = f", without shared prefixes: {self.rows_apart:.3g}" if self.rows_apart else ""
            raise GateError(
                f"gradient of the tree: expected a relative error of at most {self.limit:.3g}, received "
                f"{self.tree:.3g} ({rows_name}: {self.rows:.3g}{apart}); try another --tree-attention, and report it "
                "with the output of tree-rl doctor"
            )
        return self


def relative_error(got: Sequence[torch.Tensor], truth: Sequence[torch.Tensor]) -> float:
    """Norm of the difference over the norm of the truth, of all tensors together."""
    difference = torch.stack([(g.to(t.dtype) - t).square().sum() for g, t in zip(got, truth, strict=True)]).sum()
    return float((difference / torch.stack([t.square().sum() for t in truth]).sum()).sqrt())
