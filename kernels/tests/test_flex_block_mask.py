"""FlexAttention: the block mask is that of the dense mask; on CUDA also outputs and gradients."""

from typing import Any

import pytest
import torch
from torch.nn.attention.flex_attention import create_block_mask, create_mask
from tree_shapes import SHAPES, subtree_end_of

from tree_kernels import TreeLayout, tree_attention
from tree_kernels.tree_attention.flex import BLOCK, tree_block_mask
from tree_kernels.tree_attention.reference import visible_mask

ERROR_PER_DTYPE = {torch.bfloat16: 1e-2, torch.float16: 2e-3, torch.float32: 1e-5}


@pytest.mark.parametrize("size", [1, 127, 128, 129, 640, 1000])
@pytest.mark.parametrize("shape", ["chain", "star", "trunk_and_stubs", "random_trie", "forest"])
@pytest.mark.parametrize(("past", "window"), [(0, None), (200, None), (128, None), (0, 40), (200, 40)])
def test_mask_and_blocks_are_those_of_the_dense_mask(shape: str, size: int, past: int, window: int | None) -> None:
    layout = TreeLayout.from_subtree_end(subtree_end_of(SHAPES[shape](size)), past_length=past)
    mask = tree_block_mask(layout, window)
    queries, keys = mask.seq_lengths
    assert queries % BLOCK == 0 and keys % BLOCK == 0 and queries >= size and keys >= past + size
    dense = create_mask(mask.mask_mod, None, None, queries, keys, device="cpu")[0, 0]
    assert torch.equal(dense[:size, : past + size], visible_mask(layout, window=window))
    assert not dense[:, past + size :].any()
    assert dense.any(dim=1).all(), "a padding query that sees nothing would give NaN"
    wanted = create_block_mask(mask.mask_mod, None, None, queries, keys, device="cpu", BLOCK_SIZE=BLOCK)
    needed = wanted.to_dense()[0, 0].bool()
    visited = mask.to_dense()[0, 0].bool()
    assert (visited | ~needed).all(), "a block with visible keys is skipped"
    if window is None:
        assert torch.equal(visited, needed)
    tiles = dense.view(queries // BLOCK, BLOCK, keys // BLOCK, BLOCK).permute(0, 2, 1, 3)
    full = torch.zeros_like(visited)
    for block, count in enumerate(mask.full_kv_num_blocks[0, 0].tolist()):
        full[block, mask.full_kv_indices[0, 0, block, :count].long()] = True
    assert (~full | tiles.all(dim=-1).all(dim=-1)).all(), "a block that is masked in part is taken for full"


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
@pytest.mark.parametrize("size", [1, 65, 129, 1000])
@pytest.mark.parametrize(
    "option", [{}, {"past": 77}, {"window": 33, "past": 77}, {"softcap": 2.0}, {"sinks": True}, {"head_size": 80}]
)
def test_flex_equals_the_float64_reference(dtype: torch.dtype, size: int, option: dict[str, Any]) -> None:
    option = dict(option)
    past, head_size = option.pop("past", 0), option.pop("head_size", 64)
    torch.manual_seed(size)
    shapes = [(size, 4, head_size), *[(size, 2, head_size)] * 2, *[(past, 2, head_size)] * 2, (4,)]
    half = [torch.randn(shape, device="cuda", dtype=dtype).requires_grad_() for shape in shapes]
    exact = [t.detach().double().requires_grad_() for t in half]
    grad = torch.randn(size, 4, head_size, device="cuda", dtype=dtype)
    layout = TreeLayout.from_subtree_end(subtree_end_of(SHAPES["forest"](size)), past_length=past).to("cuda")
    sinks = option.pop("sinks", False)
    results = []
    for leaves, impl in ((half, "flex"), (exact, "reference")):
        q, k, v, past_k, past_v, sink = leaves
        extra = {"past_k": past_k, "past_v": past_v} if past else {}
        out = tree_attention(q, k, v, layout, sinks=sink if sinks else None, impl=impl, **extra, **option)
        assert isinstance(out, torch.Tensor)
        used = [t for t in leaves if t.numel() and (t is not sink or sinks)]
        results.append([out, *torch.autograd.grad(out, used, grad.to(out.dtype))])
    for actual, expected in zip(*results, strict=True):
        error = (actual.double() - expected).norm() / expected.norm().clamp(min=1e-6)
        assert error < ERROR_PER_DTYPE[dtype]
