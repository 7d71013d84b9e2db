"""Plan, scatter and attention in float64 against a plain torch decoder on rows alone: 1e-10 for any rows."""

from functools import partial

import numpy as np
import pytest
import torch
from equal_gradients import assert_equal_gradients, gradients
from hypothesis import given, settings
from hypothesis import strategies as st
from plain_decoder import PlainDecoder

from tree_kernels.tree_attention.fa4.leaf_rows import leaf_rows
from tree_rl.models.tree_inputs import TreeInputs
from tree_rl.training.loss.edges import forest_log_probs, plan_edges, tree_log_probs
from tree_rl.training.rows_alone import branch_log_probs
from tree_rl.tree.forest import Forest
from tree_rl.tree.weights import tree_mean_weights

VOCAB = 7
ROWS = st.lists(st.lists(st.integers(0, VOCAB - 1), min_size=1, max_size=9), min_size=1, max_size=7)


assert_exact = partial(assert_equal_gradients, tolerance=1e-10)


@settings(max_examples=60, deadline=None)
@given(rows=ROWS, seed=st.integers(0, 2**16))
def test_any_rows_any_row_token_weights(rows: list[list[int]], seed: int) -> None:
    model = PlainDecoder(VOCAB)
    draw = np.random.default_rng(seed)
    weight_F = torch.from_numpy(draw.normal(size=sum(map(len, rows))) * draw.integers(0, 2, sum(map(len, rows))))
    expected = branch_log_probs(model, rows)
    got = forest_log_probs(model, Forest.from_rows(rows))
    assert float((got - expected).detach().abs().max()) < 1e-10
    assert_exact(gradients(model, (got * weight_F).sum()), gradients(model, (expected * weight_F).sum()))


@settings(max_examples=30, deadline=None)
@given(rows=ROWS, seed=st.integers(0, 2**16))
def test_only_wanted_edges_at_each_rows_temperature(rows: list[list[int]], seed: int) -> None:
    model = PlainDecoder(VOCAB)
    draw = np.random.default_rng(seed)
    temperature_B = draw.choice(np.array([0.5, 1.0, 2.0], dtype=np.float32), len(rows))
    expected = torch.cat(
        [branch_log_probs(model, [r], temperature=float(t)) for r, t in zip(rows, temperature_B, strict=True)]
    )
    forest = Forest.from_rows(rows)
    wanted_F = draw.integers(0, 2, forest.num_flat).astype(bool)
    wanted_F[forest.row_index.offsets[1:] - 1] = False
    edges = plan_edges(forest, wanted_F, temperature_B)
    got = tree_log_probs(model, TreeInputs.from_forest(forest), lambda: edges)["log_probs"]
    mask_F = torch.from_numpy(wanted_F)
    assert float((got - expected * mask_F).detach().abs().max()) < 1e-10
    assert_exact(gradients(model, got.square().sum()), gradients(model, (expected * mask_F).square().sum()))
    assert len(np.unique(edges.source_E)) <= min(int(wanted_F.sum()), forest.num_unique)


@settings(max_examples=30, deadline=None)
@given(rows=ROWS)
def test_tree_loss_is_the_mean_over_branches(rows: list[list[int]]) -> None:
    # Paper, boxed: sum_t (g_t / K) l_t equals eq. 1, the mean of the branch losses, for rows of one tree.
    rows = [[0, *row] for row in rows]
    model = PlainDecoder(VOCAB)
    forest = Forest.from_rows(rows)
    weights = torch.from_numpy(np.repeat(tree_mean_weights(forest), forest.row_index.lengths))
    # At a row's end, where nothing is predicted, a log-prob is 0.
    tree = -(weights * forest_log_probs(model, forest)).sum()
    branches = -torch.stack([row.sum() for row in branch_log_probs(model, rows).split([*map(len, rows)])]).mean()
    torch.testing.assert_close(tree, branches, rtol=1e-12, atol=1e-12)
    assert_exact(gradients(model, tree), gradients(model, branches))


def test_a_wanted_last_position_names_its_row() -> None:
    forest = Forest.from_rows([[1, 2], [1, 3, 4]])
    wanted_F = np.array([True, False, True, True, True])
    with pytest.raises(ValueError, match="row 1"):
        plan_edges(forest, wanted_F, np.ones(2, dtype=np.float32))


def test_no_wanted_edge_still_reaches_every_parameter() -> None:
    model = PlainDecoder(VOCAB)
    forest = Forest.from_rows([[1], [2]])
    edges = plan_edges(forest, np.zeros(2, dtype=bool), np.ones(2, dtype=np.float32))
    out = tree_log_probs(model, TreeInputs.from_forest(forest), lambda: edges, extras=("entropy",))["log_probs"]
    assert out.tolist() == [0.0, 0.0]
    assert all(float(g.norm()) == 0 for g in torch.autograd.grad(out.sum(), list(model.parameters())))


def test_nothing_on_the_device_is_read_for_what_the_host_knows() -> None:
    layout = TreeInputs.from_forest(Forest.from_rows([[1, 2, 3], [4, 5]]), "meta").layout
    assert layout.device.type == "meta" and layout.partial_share == 1
    assert layout.subtree_end_on_host().tolist() == [3, 3, 3, 5, 5]
    rows = leaf_rows(layout, most_keys=1, fewest_queries=1)
    assert rows is not None and rows.longest_key == 3 and rows.query_offsets.shape == (3,)
