"""Who is timed: the implementations of tree attention, and what a trainer without trees runs on the same rows.

Legend: N unique tokens, F tokens of rows laid end to end, H heads, D head size.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from math import sqrt

import numpy as np
import torch
from shapes import HeadLayout

from tree_kernels import TreeLayout, tree_attention
from tree_kernels.tree_attention.api import unavailable_reason
from tree_rl.benchmark.against_packed import packed_attention
from tree_rl.benchmark.against_packed.packed_attention import PackedLayout
from tree_rl.tree import Forest

DEFAULT = {
    "cuda": ("tree fa4", "tree triton", "tree flex", "paths fa4", "paths cudnn", "paths fa2", "causal fa4"),
    "cpu": ("tree sdpa", "paths sdpa", "causal sdpa"),
}
"""Who is timed on a device unless named otherwise: "tree" with an implementation of `tree_attention`, "paths" and
"causal" with one of `packed_attention`."""
MOST_TOKENS = 300_000
"""Rows beyond are timed as an evenly spaced sample, scaled by visible pairs."""
MOST_CALLS = 64
"""Rows of a contender that calls its kernel once per row, beyond which a sample is timed as well."""
BLOCK = 128

Attention = Callable[[torch.Tensor, torch.Tensor, torch.Tensor], torch.Tensor]


@dataclass(frozen=True, kw_only=True, slots=True)
class Contender:
    """One way to run the attention of a forest."""

    name: str
    """Name in the table."""
    tokens: int
    """Tokens of q, k and v."""
    pairs: int
    """Visible pairs that it computes."""
    scale: float
    """Its time stands for so many times its pairs; 1 unless only a sample of the rows runs."""
    run: Attention
    """(q, k, v) [tokens, heads, D] to output."""
    subtree_end: torch.Tensor
    """int32 [tokens], the mask as the reference reads it."""


def passes(contender: Contender, leaves: Sequence[torch.Tensor], grad: torch.Tensor) -> dict[str, Callable[[], object]]:
    """What is timed of a contender, by name: its forward alone, and forward and backward.

    Args:
        contender: who.
        leaves: q, k and v, which require gradients.
        grad: gradient of the output.
    """

    def forward() -> None:
        with torch.no_grad():
            contender.run(*leaves)

    def total() -> None:
        torch.autograd.grad(contender.run(*leaves), leaves, grad)

    return {"forward": forward, "total": total}


def contenders_named(
    name: str, forest: Forest, device: torch.device, *, most_tokens: int = MOST_TOKENS
) -> list[Contender]:
    """The contenders of a forest behind one name of `DEFAULT`; of longer rows "paths" runs a sample."""
    kind, impl = name.split()
    if kind == "tree":
        return [tree_contender(impl, forest, device)]
    if kind == "paths":
        return [path_contender(impl, forest, device, most_tokens)]
    return causal_contenders(impl, forest, device)


def tree_contender(impl: str, forest: Forest, device: torch.device) -> Contender:
    """Tree attention by one implementation."""
    layout = TreeLayout.from_subtree_end(torch.from_numpy(forest.subtree_end)).to(device)

    def run(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        out = tree_attention(q, k, v, layout, impl=impl)
        assert isinstance(out, torch.Tensor)
        return out

    return Contender(
        name=f"tree {impl}",
        tokens=forest.num_unique,
        pairs=forest.num_pairs,
        scale=1.0,
        run=run,
        subtree_end=layout.subtree_end,
    )


def path_contender(impl: str, forest: Forest, device: torch.device, most_tokens: int) -> Contender:
    """Every row on its own, packed without padding: the strongest a trainer of rows can do."""
    lengths = forest.row_index.lengths
    most_rows = MOST_CALLS if impl in ("cudnn", "flash", "sdpa") else len(lengths)
    chosen = _sample(lengths, most_tokens, most_rows)
    layout = PackedLayout(lengths[chosen].tolist(), device)
    contender = _packed(f"paths {impl}", impl, layout, device)
    return Contender(
        name=contender.name,
        tokens=contender.tokens,
        pairs=contender.pairs,
        scale=pairs_of_rows(lengths) / contender.pairs,
        run=contender.run,
        subtree_end=contender.subtree_end,
    )


def causal_contenders(impl: str, forest: Forest, device: torch.device) -> list[Contender]:
    """One plain causal row of the same tokens, and one of the same operations."""
    equal = max(BLOCK, round(sqrt(2 * forest.num_pairs) / BLOCK) * BLOCK)
    sizes = {"equal tokens": forest.num_unique, "equal operations": equal}
    return [
        _packed(f"causal {impl}, {what}", impl, PackedLayout([size], device), device) for what, size in sizes.items()
    ]


def reason_against(name: str, device: torch.device, dtype: torch.dtype, heads: HeadLayout) -> str | None:
    """Why a contender cannot run, or None."""
    kind, impl = name.split()
    if kind == "tree":
        return unavailable_reason(impl, device=device, dtype=dtype, head_size=heads.head_size)
    return packed_attention.unavailable_reason(impl, device, dtype)


def pairs_of_rows(lengths: np.ndarray) -> int:
    """Visible pairs of rows run alone."""
    sizes = lengths.astype(np.int64)
    return int((sizes * (sizes + 1) // 2).sum())


def _packed(name: str, impl: str, layout: PackedLayout, device: torch.device) -> Contender:
    lengths = np.array(layout.lengths)
    ends = np.repeat(np.cumsum(lengths), lengths).astype(np.int32)
    return Contender(
        name=name,
        tokens=int(lengths.sum()),
        pairs=pairs_of_rows(lengths),
        scale=1.0,
        run=partial(packed_attention.packed_attention, layout=layout, impl=impl),
        subtree_end=torch.from_numpy(ends).to(device),
    )


def _sample(lengths: np.ndarray, most_tokens: int, most_rows: int) -> np.ndarray:
    """Indices of evenly spaced rows: all of them where they fit."""
    share = min(1.0, most_tokens / lengths.sum(), most_rows / len(lengths))
    count = max(1, int(len(lengths) * share))
    return np.unique(np.linspace(0, len(lengths) - 1, count).round().astype(int))
