"""Overlap figures and costs against counting by hand."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tree_rl.tree import Forest
from tree_rl.tree.cost import LEAST_GAIN, ModelShape, forest_cost, row_cost, tree_pays
from tree_rl.tree.report.overlap import measure_forest, measure_trees

ROWS = st.lists(st.lists(st.integers(0, 2), min_size=1, max_size=7), max_size=9)
SHAPE = ModelShape(hidden=8, layers=2, intermediate=16, heads=4, kv_heads=2, head_dim=3, vocab=50)


@given(rows=ROWS, seed=st.integers(0, 99), masked=st.booleans())
@settings(max_examples=150, deadline=None)
def test_figures_equal_a_count_by_hand(rows, seed, masked):
    forest = Forest.from_rows(rows)
    mask = np.random.default_rng(seed).integers(0, 2, forest.num_flat) if masked else np.ones(forest.num_flat)
    trained = forest.row_index.with_values(mask) if masked else None
    trees = measure_trees(forest, trained=trained)
    assert len(trees) == forest.num_trees
    for tree, overlap in enumerate(trees):
        members = [row for row in range(len(rows)) if forest.tree_of_row[row] == tree]
        prefixes = {tuple(rows[row][: d + 1]) for row in members for d in range(len(rows[row]))}
        flat_marks = [mask[forest.row_index.offsets[row] + d] for row in members for d in range(len(rows[row]))]
        marked = {
            tuple(rows[row][: d + 1])
            for row in members
            for d in range(len(rows[row]))
            if mask[forest.row_index.offsets[row] + d]
        }
        followers = [{p for p in prefixes if p[:-1] == prefix} for prefix in prefixes]
        assert overlap.paths == len(members)
        assert overlap.unique_tokens == len(prefixes)
        assert overlap.flat_tokens == sum(len(rows[row]) for row in members)
        assert overlap.unique_pairs == sum(len(prefix) for prefix in prefixes)
        assert overlap.flat_pairs == sum(d + 1 for row in members for d in range(len(rows[row])))
        assert overlap.unique_head_tokens == len(marked)
        assert overlap.flat_head_tokens == sum(flat_marks)
        assert overlap.branch_points == sum(len(children) > 1 for children in followers)
        assert overlap.depth == max(len(rows[row]) for row in members)
    total = measure_forest(forest, trained=trained)
    assert total.unique_tokens == forest.num_unique
    assert total.segments == forest.num_segments == sum(overlap.segments for overlap in trees)
    assert total.por == pytest.approx(forest.por)
    assert total.token_bound == pytest.approx(forest.token_bound)
    assert total.tree_flops(SHAPE) == pytest.approx(forest_cost(SHAPE, forest, trained))
    if not masked:
        assert total.flat_flops(SHAPE) == pytest.approx(row_cost(SHAPE, forest.row_index.lengths).sum())


def test_operations_of_one_token_by_hand():
    # q, k, v, o: 8 * 3 * (4 + 2 + 2 + 4); gate, up, down: 3 * 8 * 16; two layers; multiply-add; three passes.
    projections = 8 * 3 * 12 + 3 * 8 * 16
    attention_pair = 2 * 2 * 4 * 3
    expected = 3 * (2 * 2 * projections + 2 * attention_pair + 2 * 8 * 50)
    assert row_cost(SHAPE, np.array([1]))[0] == expected
    assert forest_cost(SHAPE, Forest.from_rows([[1]])) == expected


def test_without_a_shared_prefix_nothing_is_saved():
    overlap = measure_forest(Forest.from_rows([[1, 2], [3, 4, 5]]))
    assert (overlap.por, overlap.token_bound, overlap.flop_bound(SHAPE)) == (0.0, 1.0, 1.0)


def test_rows_that_share_nothing_run_as_a_tree_where_its_head_has_less_to_do():
    forest = Forest.from_rows([[1, 2], [3, 4, 5]])
    assert not tree_pays(SHAPE, forest)
    wanted = {places: forest.row_index.with_values(np.arange(5) < places) for places in range(6)}
    assert not tree_pays(SHAPE, forest, wanted[5])
    assert tree_pays(SHAPE, forest, wanted[1])
    # Stock verl's head runs at all five positions, ours where a log-prob is asked for.
    total = forest_cost(SHAPE, forest)
    for places, marks in wanted.items():
        saved = (5 - places) * SHAPE.flops_per_head_token
        assert tree_pays(SHAPE, forest, marks) == (total >= LEAST_GAIN * (total - saved))


def test_attention_lowers_the_bound_when_branches_are_long():
    prefix = [0] * 100
    forest = Forest.from_rows([prefix + [branch] * 900 for branch in (1, 2, 3, 4)])
    overlap = measure_forest(forest)
    assert 1.0 < overlap.flop_bound(SHAPE) < overlap.token_bound


def test_no_rows_give_zeros():
    overlap = measure_forest(Forest.from_rows([]))
    assert (overlap.paths, overlap.unique_pairs, overlap.depth, overlap.por, overlap.token_bound) == (0, 0, 0, 0.0, 1.0)
    assert overlap.flop_bound(SHAPE) == 1.0


def test_a_shape_below_one_is_refused():
    with pytest.raises(ValueError, match=r"ModelShape.layers: expected at least 1, received 0"):
        ModelShape(hidden=8, layers=0, intermediate=16, heads=4, kv_heads=2, head_dim=3, vocab=50)


def test_experts_cost_what_a_token_visits() -> None:
    sizes = {"hidden_size": 8, "num_hidden_layers": 2, "num_attention_heads": 4, "vocab_size": 50}
    dense = ModelShape.from_config({**sizes, "intermediate_size": 16})
    assert dense.intermediate == 16
    mixtral = ModelShape.from_config({**sizes, "intermediate_size": 16, "num_experts_per_tok": 2})
    assert mixtral.intermediate == 2 * 16
    experts = {"num_experts_per_tok": 3, "moe_intermediate_size": 5}
    assert ModelShape.from_config({**sizes, "intermediate_size": 16, **experts}).intermediate == 3 * 5
    # Qwen3.5-MoE has no dense MLP, but a shared expert.
    assert ModelShape.from_config({**sizes, **experts, "shared_expert_intermediate_size": 7}).intermediate == 3 * 5 + 7
    with pytest.raises(ValueError, match="expected the sizes intermediate_size"):
        ModelShape.from_config(sizes)
