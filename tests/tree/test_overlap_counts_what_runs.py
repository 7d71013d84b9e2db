"""Overlap figures and costs against counting by hand."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tree_rl.cost.cost_model import LEAST_GAIN, ModelShape
from tree_rl.tree import Forest
from tree_rl.tree.report.overlap import combine, measure_forest

ROWS = st.lists(st.lists(st.integers(0, 2), min_size=1, max_size=7), max_size=9)
SHAPE = ModelShape(hidden=8, layers=2, intermediate=16, heads=4, kv_heads=2, head_dim=3, vocab=50)


@given(rows=ROWS, seed=st.integers(0, 99), masked=st.booleans())
@settings(max_examples=60, deadline=None)
def test_figures_equal_a_count_by_hand_and_those_of_trees_add_up(rows, seed, masked):
    forest = Forest.from_rows(rows)
    mask = np.random.default_rng(seed).integers(0, 2, forest.num_flat) if masked else np.ones(forest.num_flat)
    trained = forest.row_index.with_values(mask) if masked else None
    overlap = measure_forest(forest, trained=trained)
    places = [(row, depth) for row in range(len(rows)) for depth in range(len(rows[row]))]
    prefixes = {tuple(rows[row][: depth + 1]) for row, depth in places}
    marked = [place for place in places if mask[forest.row_index.offsets[place[0]] + place[1]]]
    assert overlap.paths == len(rows)
    assert overlap.unique_tokens == forest.num_unique == len(prefixes)
    assert overlap.flat_tokens == len(places)
    assert overlap.unique_pairs == sum(len(prefix) for prefix in prefixes)
    assert overlap.flat_pairs == sum(depth + 1 for _, depth in places)
    assert overlap.unique_head_tokens == len({tuple(rows[row][: depth + 1]) for row, depth in marked})
    assert overlap.flat_head_tokens == len(marked)
    assert overlap.depth == max(map(len, rows), default=0)
    assert overlap.por == pytest.approx(forest.por)
    assert overlap.token_bound == pytest.approx(forest.token_bound)
    assert SHAPE.tree_flops(overlap) == pytest.approx(SHAPE.cost.forest(forest, trained))
    if not masked:
        assert SHAPE.flat_flops(overlap) == pytest.approx(SHAPE.cost.rows(forest.row_index.lengths).sum())
    trees = [np.flatnonzero(forest.tree_of_row == tree) for tree in range(forest.num_trees)]
    masks = [None if trained is None else trained.select(tree) for tree in trees]
    parts = [measure_forest(forest.select_rows(tree), trained=one) for tree, one in zip(trees, masks, strict=True)]
    assert combine(parts) == overlap


def test_operations_of_one_token_by_hand():
    # q, k, v, o: 8 * 3 * (4 + 2 + 2 + 4); gate, up, down: 3 * 8 * 16; two layers; multiply-add; three passes.
    projections = 8 * 3 * 12 + 3 * 8 * 16
    attention_pair = 2 * 2 * 4 * 3
    expected = 3 * (2 * 2 * projections + 2 * attention_pair + 2 * 8 * 50)
    assert SHAPE.cost.rows(np.array([1]))[0] == expected
    assert SHAPE.cost.forest(Forest.from_rows([[1]])) == expected


def test_rows_that_share_nothing_run_as_a_tree_where_its_head_has_less_to_do():
    forest = Forest.from_rows([[1, 2], [3, 4, 5]])
    assert not SHAPE.cost.tree_pays(forest)
    wanted = {places: forest.row_index.with_values(np.arange(5) < places) for places in range(6)}
    assert not SHAPE.cost.tree_pays(forest, wanted[5])
    assert SHAPE.cost.tree_pays(forest, wanted[1])
    # Stock verl's head runs at all five positions, ours where a log-prob is asked for.
    total = SHAPE.cost.forest(forest)
    for places, marks in wanted.items():
        saved = (5 - places) * SHAPE.cost.per_head_token
        assert SHAPE.cost.tree_pays(forest, marks) == (total >= LEAST_GAIN * (total - saved))


def test_no_rows_give_zeros():
    overlap = measure_forest(Forest.from_rows([]))
    assert (overlap.paths, overlap.unique_pairs, overlap.depth, overlap.por, overlap.token_bound) == (0, 0, 0, 0.0, 1.0)
    assert SHAPE.flop_bound(overlap) == 1.0


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
