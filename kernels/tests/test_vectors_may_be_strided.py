"""A bias, or sinks, may be a column of a larger tensor: Triton kernels read no other column."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from tree_shapes import chain, subtree_end_of

from tree_kernels import edge_log_probs, tree_attention, tree_causal_conv1d

pytest.importorskip("triton", reason="Triton is not installed")

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
SIZE = 16
END = subtree_end_of(chain(SIZE)).to(DEVICE)
READ: dict[str, Callable[[torch.Tensor, torch.Tensor], Any]] = {
    "sinks of attention": lambda x, vector: tree_attention(
        *x[:, None].expand(3, -1, SIZE, -1), END, sinks=vector, impl="triton"
    ),
    "bias of a convolution": lambda x, vector: tree_causal_conv1d(x, x[:, :4], vector, END, impl="triton")[0],
    "bias of a head": lambda x, vector: edge_log_probs(x, x, END - 1, END - 1, bias=vector, impl="triton").log_prob,
}


@pytest.mark.parametrize("name", READ)
def test_a_column_is_read_like_a_vector(name: str) -> None:
    x = torch.randn(SIZE, SIZE, generator=torch.Generator().manual_seed(0)).to(DEVICE)
    results = []
    for vector in (x[0].clone(), torch.stack([x[0], torch.full_like(x[0], torch.nan)], dim=1)[:, 0]):
        vector.requires_grad_()
        out = READ[name](x, vector)
        results.append((out, *torch.autograd.grad(out.square().sum(), vector)))
    for expected, got in zip(*results, strict=True):
        torch.testing.assert_close(got, expected, rtol=0, atol=0)
