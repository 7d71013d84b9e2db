"""The gated delta rule over trees against one linear sequence of the same tokens, behind a gate, as a CSV.

Contenders are "tree IMPL" (this op), "linear IMPL" and "linear fla" (the same number of tokens in one row), "rows IMPL"
and "rows fla" (every row alone, packed). fla is flash-linear-attention; where it does not import or refuses to run, its
lines say why.

python benchmarks/kernels/gated_delta_rule.py --out docs/benchmarks/gated_delta_rule.csv
"""

import sys
from functools import partial
from pathlib import Path
from typing import ClassVar

import torch

sys.path.insert(0, str(Path(__file__).parent))
from recurrence_runs import Recurrence, compare, recurrence_parser

from tree_kernels import TreeLayout, tree_gated_delta_rule
from tree_kernels.tree_gated_delta_rule.api import unavailable_reason


class DeltaRule(Recurrence):
    """The gated delta rule, beside flash-linear-attention's; heads of keys and values, then their sizes, of a model."""

    heads_of: ClassVar = {"qwen3.5": (16, 32, 128, 128), "small": (2, 4, 64, 64), "tiny": (1, 2, 16, 16)}
    names = ("q", "k", "v", "g", "beta")
    like_output = 2
    limits: ClassVar = {torch.bfloat16: 1.2e-2, torch.float16: 1.5e-3, torch.float32: 2e-6}
    rival, rival_module = "fla", "fla.ops.gated_delta_rule"
    rival_slack = 2  # its path sums of the gates are float32; a wrong product shows as an error of 1

    def _ours(self, layout: TreeLayout, impl: str, *leaves: torch.Tensor) -> torch.Tensor:
        return tree_gated_delta_rule(*leaves, layout=layout, impl=impl)[0]

    def _rivals(self, offsets: torch.Tensor | None, *leaves: torch.Tensor) -> torch.Tensor:
        from fla.ops.gated_delta_rule import chunk_gated_delta_rule

        # Faster than as transformers calls it, which repeats keys for every value head.
        q, k, v, g, beta = (t.unsqueeze(0) for t in leaves)
        return chunk_gated_delta_rule(q, k, v, g=g, beta=beta, cu_seqlens=offsets)[0][0]

    def _reason_against_ours(self, impl: str) -> str | None:
        sizes = {"key_size": self.heads[2], "value_size": self.heads[3]}
        return unavailable_reason(impl, device=self.device, dtype=self.dtype, **sizes)

    def _leaves(self, tokens: int, draw: torch.Generator) -> list[torch.Tensor]:
        key_heads, value_heads, key_size, value_size = self.heads
        keys, values = (key_heads, key_size), (value_heads, value_size)
        random = {"generator": draw, "device": self.device}
        q, k, v = (torch.randn(tokens, *shape, **random) for shape in (keys, keys, values))
        unit = partial(torch.nn.functional.normalize, dim=-1)
        half = [one.to(self.dtype) for one in (unit(q), unit(k), v)]
        return [*half, self.decay(tokens, value_heads, draw), torch.rand(tokens, value_heads, **random)]


def _force_fla() -> None:
    """Take away fla's guard against a miscompiled product (Triton 3.4 to 3.7.0, Hopper), which needs smaller heads."""
    from fla.ops.common import chunk_o

    chunk_o.TRITON_ABOVE_3_7_1 = True


def main() -> None:
    """Measure, print a summary, write the CSV after every row."""
    options = recurrence_parser(__doc__, DeltaRule)
    options.add_argument(
        "--force-fla", action="store_true", help="run fla where it refuses Triton on Hopper; the gate still decides"
    )
    args = options.parse_args()
    if args.force_fla:
        _force_fla()
    names = ("tree IMPL", "linear IMPL", "linear fla", "rows IMPL", "rows fla")
    compare(args, DeltaRule, names, ("flash-linear-attention", "tilelang"))


if __name__ == "__main__":
    main()
