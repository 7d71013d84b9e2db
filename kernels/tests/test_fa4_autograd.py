"""Around flash-attn-4's kernels nothing is lost: padding, window, past and gradients reach the caller as they should.

The package runs on Hopper only; here the plan's own dense mask stands in for its kernels, in float64.
"""

import sys
from types import ModuleType
from typing import Any

import pytest
import torch
from attention_problems import seen_by_vectors
from tree_shapes import SHAPES, layout_of, rows, rows_below

from tree_kernels import TreeLayout
from tree_kernels.tree_attention.fa4 import fa4_plan as fa4_plan_module
from tree_kernels.tree_attention.fa4.autograd import fa4_attention_of_tree
from tree_kernels.tree_attention.fa4.fa4_plan import Fa4Plan, rows_worth_copying
from tree_kernels.tree_attention.fa4.leaf_rows import LeafRows
from tree_kernels.tree_attention.reference import reference_attention
from tree_kernels.tree_attention.score_rule import ScoreRule

Plans = list[Fa4Plan | LeafRows]
"""That kernels were given."""


def dense_forward(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, plan: Fa4Plan | LeafRows, scale: float
) -> tuple[torch.Tensor, torch.Tensor]:
    queries, keys = q.shape[0], k.shape[0]
    query, key = torch.arange(queries)[:, None], torch.arange(keys)
    if isinstance(plan, LeafRows):
        row, row_of_key = (
            torch.bucketize(index, offsets[1:], right=True)
            for index, offsets in ((query, plan.query_offsets), (key, plan.key_offsets))
        )
        # The last query of a row sees its last key.
        seen = (row == row_of_key) & (key <= query + (plan.key_offsets - plan.query_offsets)[row + 1])
    else:
        seen = seen_by_vectors(plan, query[:, 0], key, keys - queries)
    group = q.shape[1] // k.shape[1]
    scores = scale * torch.einsum("nhd,mhd->hnm", q, k.repeat_interleave(group, 1))
    scores = scores.masked_fill(~seen, float("-inf"))
    out = torch.einsum("hnm,mhd->nhd", scores.softmax(-1), v.repeat_interleave(group, 1))
    return out, scores.logsumexp(-1)


def dense_backward(*arguments: Any) -> tuple[torch.Tensor, ...]:
    q, k, v, _, _, grad_out, plan, scale = arguments
    assert grad_out.is_contiguous() and not any(0 in t.stride() for t in (q, k, v))
    leaves = [t.detach().requires_grad_() for t in (q, k, v)]
    with torch.enable_grad():
        return torch.autograd.grad(dense_forward(*leaves, plan, scale)[0], leaves, grad_out)


@pytest.fixture
def plans(monkeypatch: pytest.MonkeyPatch) -> Plans:
    """Dense attention in place of the kernels."""
    given: Plans = []

    def forward(*arguments: Any) -> tuple[torch.Tensor, torch.Tensor]:
        given.append(arguments[3])
        return dense_forward(*arguments)

    kernels = ModuleType("tree_kernels.tree_attention.fa4.calls")
    kernels.forward, kernels.backward = forward, dense_backward  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, kernels.__name__, kernels)
    monkeypatch.setattr(sys.modules["tree_kernels.tree_attention.fa4"], "calls", kernels, raising=False)
    return given


def check_against_reference(layout: TreeLayout, window: int | None) -> None:
    size, past = layout.num_tokens, layout.past_length
    torch.manual_seed(size)
    q = torch.randn(size, 4, 64, dtype=torch.float64, requires_grad=True)
    k = torch.randn(past + size, 1, 64, dtype=torch.float64, requires_grad=True)
    v = torch.randn(past + size, 2, 64, dtype=torch.float64, requires_grad=True)
    rule = ScoreRule(scale=0.2, window=window)
    wide_k = k.expand_as(v)
    own = fa4_attention_of_tree(q, wide_k, v, layout, rule)
    expected, _ = reference_attention(q, wide_k, v, None, layout, rule)
    torch.testing.assert_close(own, expected, rtol=0, atol=1e-12)
    weight = torch.randn(4, 64, dtype=torch.float64).expand_as(own)
    for mine, theirs in zip(
        torch.autograd.grad(own, (q, k, v), weight), torch.autograd.grad(expected, (q, k, v), weight), strict=True
    ):
        torch.testing.assert_close(mine, theirs, rtol=0, atol=1e-11)


FORESTS = {size: SHAPES["forest"](size) for size in (1, 192, 193, 260)}
FEW, MANY = rows(100, 92), rows(200, 60)


@pytest.mark.parametrize(
    ("parent", "past", "window"),
    [
        *((FORESTS[1], 0, None), (FORESTS[1], 5, 20), (FORESTS[192], 0, 20), (FORESTS[193], 77, None)),
        *((FORESTS[260], 1, 20), (FEW, 0, None), (MANY, 3, None), (MANY, 0, 20)),
    ],
)
def test_forests_and_rows_that_are_few_or_have_a_past_or_a_window_run_the_tree_kernels(
    parent: list[int], past: int, window: int | None, plans: Plans
) -> None:
    check_against_reference(layout_of(parent, past), window)
    assert [type(plan) for plan in plans] == [Fa4Plan]


@pytest.mark.parametrize("sizes", [(1, 60, 131, 1), (1,) * 300])
def test_rows_that_share_nothing_are_run_as_rows(sizes: tuple[int, ...], plans: Plans) -> None:
    check_against_reference(layout_of(rows(*sizes)), None)
    (plan,) = plans
    assert isinstance(plan, LeafRows) and plan.copies is None
    assert plan.query_offsets.diff().tolist() == list(sizes) and plan.longest_query == max(sizes)


@pytest.mark.slow
def test_rows_that_share_little_are_run_as_rows_over_copied_keys(plans: Plans) -> None:
    shared, sizes = 130, (600, 557, 601)
    check_against_reference(layout_of(rows_below(shared, *sizes)), None)
    (plan,) = plans
    assert isinstance(plan, LeafRows) and plan.copies is not None
    assert plan.query_offsets.diff().tolist() == [shared + 600, 557, 601, 300]
    assert plan.key_offsets.diff().tolist() == [shared + 600, shared + 557, shared + 601, 300]
    assert (plan.longest_query, plan.longest_key) == (shared + 600, shared + 601)


@pytest.mark.parametrize(("shared", "sizes"), [(900, (600, 600)), (10, (400,) * 6)])
def test_rows_that_share_more_or_are_short_keep_the_tree_kernels(shared: int, sizes: tuple[int, ...]) -> None:
    assert rows_worth_copying(layout_of(rows_below(shared, *sizes)), None) is None


@pytest.mark.parametrize("shape", SHAPES)
def test_every_forest_is_its_rows_over_copied_keys(shape: str, plans: Plans, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fa4_plan_module, "MOST_KEYS", float("inf"))
    monkeypatch.setattr(fa4_plan_module, "FEWEST_QUERIES", 0)
    check_against_reference(layout_of(SHAPES[shape](230)), None)
    assert [type(plan) for plan in plans] == [LeafRows]
