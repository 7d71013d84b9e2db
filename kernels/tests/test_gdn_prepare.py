"""The inverses of tiles, by rows and by blocks of rows, against float64: forests and keys that ask most of them."""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from recurrences import fork
from tree_shapes import SHAPES, subtree_end_of

pytest.importorskip("triton", reason="Triton is not installed")

from tree_kernels import TreeLayout
from tree_kernels.tree_gated_delta_rule.triton_kernels import autograd, launch
from tree_kernels.tree_gated_delta_rule.triton_kernels.device_plan import device_plan

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
HEADS, SIZE = 1, 16
FORESTS = {
    "chain": SHAPES["chain"](64),
    "comb": SHAPES["comb"](61),
    "random": SHAPES["random_trie"](63),
    "fork": fork(17, [1, 1, 30, 10]),
}
KEYS: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "random": lambda noise: noise,
    "repeated": lambda noise: noise[:1].expand_as(noise),
    "nearly_repeated": lambda noise: noise[:1] + 0.1 * noise,
    "in_turns": lambda noise: noise[:3].repeat(len(noise) // 3 + 1, 1, 1)[: len(noise)],
}
LARGEST_ERROR = {torch.float32: 2e-6, torch.float16: 1e-3}
TF32_ERROR = 1.5e-3
"""A tf32 whose low bits are cut off is off by up to 1e-3, as random inverses are that are rounded to bfloat16."""


def prepared(
    parent: list[int], keys: str, decay: float, dtype: torch.dtype, *, block_rows: int | None, tile_tokens: int = 64
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Path sums [2, T, H, C], inverses [T, H, C, C] and the true inverses in float64; writes are of full strength."""
    draw = torch.Generator().manual_seed(len(parent))
    noise = torch.randn(len(parent), 1, SIZE, generator=draw)
    k = torch.nn.functional.normalize(KEYS[keys](noise), dim=-1).to(dtype).to(DEVICE).contiguous()
    g = (-decay * torch.rand(len(parent), HEADS, generator=draw)).to(DEVICE)
    v, beta = (t.to(DEVICE) for t in (torch.zeros(len(parent), HEADS, SIZE, dtype=dtype), torch.ones_like(g.cpu())))
    plan = device_plan(TreeLayout.from_subtree_end(subtree_end_of(parent)).to(DEVICE), tile_tokens, ())
    state = torch.zeros(HEADS, SIZE, SIZE, device=DEVICE)
    problem = autograd._problem((k, k, v, g, beta, state, plan, 0.25, tile_tokens))
    problem = replace(problem, launches=replace(problem.launches, inverse_block_rows=block_rows))
    decays, inverse = launch.prepare(problem)
    return decays.path, inverse, true_inverse(plan.token.long(), plan.row_end, k.double(), g.double())


def true_inverse(token_TC: torch.Tensor, row_end_TC: torch.Tensor, k: torch.Tensor, g: torch.Tensor) -> torch.Tensor:
    """Inverse of I + L of each tile, [T, H, C, C]; rows past the last token have neither keys nor gates."""
    nothing = torch.zeros(1, dtype=torch.float64, device=k.device)
    k_TCK = torch.cat([k[:, 0], nothing.expand(1, SIZE)])[token_TC]
    g_THC = torch.cat([g, nothing.expand(1, HEADS)])[token_TC].transpose(1, 2)
    row = torch.arange(token_TC.shape[1], device=k.device)
    sees = (row[None, :] <= row[:, None]) & (row[:, None] < row_end_TC[:, None, :])
    path = (sees[:, None] * g_THC[:, :, None, :]).sum(-1)
    decay = (path[..., :, None] - path[..., None, :]).exp()
    lower = torch.where((sees & (row[None, :] < row[:, None]))[:, None], decay * (k_TCK @ k_TCK.mT)[:, None], 0.0)
    eye = torch.eye(len(row), dtype=torch.float64, device=k.device)
    return torch.linalg.solve_triangular(eye + lower, eye.expand_as(lower), upper=False)


def relative_error(actual: torch.Tensor, expected: torch.Tensor) -> float:
    """Largest of all tiles and heads, in norm."""
    assert actual.isfinite().all()
    return float(((actual.double() - expected).norm(dim=(-2, -1)) / expected.norm(dim=(-2, -1))).max())


@pytest.mark.parametrize("dtype", (torch.float32, pytest.param(torch.float16, marks=pytest.mark.slow)))
@pytest.mark.parametrize("keys", KEYS)
@pytest.mark.parametrize(
    "forest", ("random", *(pytest.param(f, marks=pytest.mark.slow) for f in FORESTS if f != "random"))
)
def test_blocks_of_rows_give_the_inverse_that_rows_give(forest: str, keys: str, dtype: torch.dtype) -> None:
    decay = 20.0 if forest == "random" else 0.0
    by_row, by_block = (prepared(FORESTS[forest], keys, decay, dtype, block_rows=rows) for rows in (None, 8))
    assert torch.equal(by_row[0], by_block[0])
    # On a GPU the products are tf32's.
    limit = LARGEST_ERROR[dtype] if DEVICE.type == "cpu" else TF32_ERROR
    assert relative_error(by_row[1], by_row[2]) < LARGEST_ERROR[dtype]
    assert relative_error(by_block[1], by_row[2]) < limit


@pytest.mark.parametrize(("tile_tokens", "block_rows"), [(16, 64), (32, 16), (64, 32)])
def test_blocks_of_any_size(tile_tokens: int, block_rows: int) -> None:
    _, inverse, truth = prepared(
        FORESTS["random"], "in_turns", 0.2, torch.float16, block_rows=block_rows, tile_tokens=tile_tokens
    )
    assert relative_error(inverse, truth) < TF32_ERROR


@pytest.mark.skipif(DEVICE.type == "cuda", reason="emulates what a GPU does")
@pytest.mark.parametrize("keys", KEYS)
def test_products_in_tf32_lose_no_more_than_bfloat16(keys: str, monkeypatch: pytest.MonkeyPatch) -> None:
    from triton.runtime import interpreter

    exact, cut = interpreter.InterpreterBuilder.create_dot, []

    def in_tf32(self: Any, a: Any, b: Any, d: Any, input_precision: Any, *rest: Any) -> Any:
        if input_precision.name == "TF32":
            a, b = (interpreter.TensorHandle(without_low_bits(t.data), t.dtype.scalar) for t in (a, b))
            cut.append(a)
        return exact(self, a, b, d, input_precision, *rest)

    monkeypatch.setattr(interpreter.InterpreterBuilder, "create_dot", in_tf32)
    for forest in ("random", "comb"):
        parent = FORESTS[forest]
        _, inverse, truth = prepared(parent, keys, 20.0 if forest == "random" else 0.0, torch.float32, block_rows=8)
        assert relative_error(inverse, truth) < TF32_ERROR, forest
    assert cut


def without_low_bits(values: np.ndarray) -> np.ndarray:
    """The 10 bits of a fraction that tf32 keeps, cut rather than rounded: the worse of the two."""
    return (np.ascontiguousarray(values, np.float32).view(np.uint32) & np.uint32(0xFFFFE000)).view(np.float32)
