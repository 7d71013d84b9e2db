"""The recurrence of Mamba 2 over trees against one linear sequence of the same tokens, behind a gate, as a CSV.

Contenders are "tree IMPL" (this op), "linear IMPL" and "linear mamba_ssm" (the same number of tokens in one row). Where
mamba_ssm does not import, its line says why. Every time is that of forward and backward.

python benchmarks/kernels/state_space.py --out docs/benchmarks/state_space.csv
"""

import sys
from functools import partial
from pathlib import Path
from typing import ClassVar

import torch

sys.path.insert(0, str(Path(__file__).parent))
from recurrence_runs import Recurrence, compare, recurrence_parser

from tree_kernels import TreeLayout, tree_state_space
from tree_kernels.tree_state_space.api import unavailable_reason


class StateSpace(Recurrence):
    """The recurrence of Mamba 2, beside mamba_ssm's; heads are groups, heads, state size and head size of a model."""

    heads_of: ClassVar = {"nemotron-h-8b": (8, 128, 128, 64), "zamba2": (1, 80, 64, 64), "tiny": (1, 2, 16, 16)}
    names = ("x", "b", "c", "g", "dt")
    like_output = 0
    limits: ClassVar = {torch.bfloat16: 2e-2, torch.float16: 3e-3, torch.float32: 2e-6}
    rival, rival_module = "mamba_ssm", "mamba_ssm.ops.triton.ssd_combined"

    def _ours(self, layout: TreeLayout, impl: str, *leaves: torch.Tensor) -> torch.Tensor:
        return tree_state_space(*leaves, layout, impl=impl)[0]

    def _rivals(self, offsets: torch.Tensor | None, *leaves: torch.Tensor) -> torch.Tensor:
        from mamba_ssm.ops.triton.ssd_combined import mamba_chunk_scan_combined

        assert offsets is None, "mamba_ssm runs one row"
        # It multiplies one decay per head with the step; for decays per token, the step goes into x instead.
        x, b, c, g, dt = leaves
        of_heads = -torch.ones(x.shape[1], device=x.device)
        written = (x * (dt / -g).unsqueeze(-1)).to(x.dtype)
        return mamba_chunk_scan_combined(written[None], -g[None], of_heads, b[None], c[None], chunk_size=256)[0]

    def _reason_against_ours(self, impl: str) -> str | None:
        sizes = {"state_size": self.heads[2], "head_size": self.heads[3]}
        return unavailable_reason(impl, device=self.device, dtype=self.dtype, **sizes)

    def _leaves(self, tokens: int, draw: torch.Generator) -> list[torch.Tensor]:
        groups, heads, state, size = self.heads
        normal = partial(torch.randn, generator=draw, device=self.device)
        shapes = ((tokens, heads, size), (tokens, groups, state), (tokens, groups, state))
        steps = torch.rand(tokens, heads, generator=draw, device=self.device)
        return [*(normal(shape).to(self.dtype) for shape in shapes), self.decay(tokens, heads, draw), steps]


def main() -> None:
    """Measure, print a summary, write the CSV after every row."""
    args = recurrence_parser(__doc__, StateSpace).parse_args()
    compare(args, StateSpace, ("tree IMPL", "linear IMPL", "linear mamba_ssm"), ("mamba-ssm",))


if __name__ == "__main__":
    main()
