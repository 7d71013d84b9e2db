"""No time is measured when the tree's gradient is wrong, and batches are what their options say."""

from collections.abc import Iterator
from dataclasses import replace

import pytest
import torch

from tree_rl.benchmark.against_packed.gradient_check import check_gradients
from tree_rl.benchmark.against_packed.packed_updates import compare
from tree_rl.benchmark.against_packed.random_model import build_model, build_optimizer
from tree_rl.benchmark.against_packed.update import PACKED, ForwardPlan, packed_planner, tree_planner
from tree_rl.benchmark.batch import Batch, agent_batch
from tree_rl.benchmark.comparison import TREE
from tree_rl.benchmark.gradient_errors import GateError, GradientErrors
from tree_rl.cost.model_sizes import MODEL_SIZES
from tree_rl.models.tree_inputs import TreeInputs

CPU = torch.device("cpu")


def siblings_follow_each_other(batch: Batch) -> Iterator[ForwardPlan]:
    """A tree whose positions are those of one long row."""
    for forward in tree_planner(10_000, CPU)(batch):
        inputs = forward.inputs
        assert isinstance(inputs, TreeInputs)
        wrong_1N = torch.arange(inputs.input_ids_1n.shape[1])[None]
        yield replace(forward, inputs=replace(inputs, position_ids_1n=wrong_1N))


def test_wrong_positions_do_not_pass_the_gate() -> None:
    model = build_model(MODEL_SIZES["tiny"], device=CPU, dtype=torch.float32)
    batch = agent_batch(por=0.5, num_rows=4, row_tokens=40, num_groups=1, trained_share=0.5, vocab=512)
    planners = {TREE: siblings_follow_each_other, PACKED: packed_planner(10_000, CPU)}
    with pytest.raises(GateError, match="gradient of the tree"):
        compare(model, build_optimizer(model, lr=0.0), batch, planners, repeats=1)


def test_a_wrong_tree_in_bf16_fails_beside_rows_that_repeat_nothing_too() -> None:
    model = build_model(MODEL_SIZES["tiny"], device=CPU, dtype=torch.bfloat16)
    batch = agent_batch(por=0.7, num_rows=8, row_tokens=200, num_groups=1, trained_share=0.3, vocab=512)
    assert batch.apart().overlap().por < 0.01 and batch.overlap().por > 0.69
    rows = packed_planner(10_000, CPU)
    errors = check_gradients(model, batch, tree_planner(10_000, CPU), rows)
    assert errors.tree <= errors.limit
    with pytest.raises(GateError, match="without shared prefixes"):
        check_gradients(model, batch, siblings_follow_each_other, rows)


def test_the_yardstick_of_rows_apart_is_the_larger_of_both() -> None:
    assert GradientErrors(tree=0.0114, rows=0.0101).limit < 0.0114
    GradientErrors(tree=0.0114, rows=0.0101, rows_apart=0.0114).require_exact("packed rows")
    with pytest.raises(GateError, match=r"received 0\.013"):
        GradientErrors(tree=0.013, rows=0.0101, rows_apart=0.0114).require_exact("packed rows")


@pytest.mark.parametrize("por", [0.0, 0.2, 0.5, 0.8, 0.92])
def test_synthetic_agents_have_the_overlap_asked_for(por: float) -> None:
    batch = agent_batch(por=por, num_rows=16, row_tokens=2_000, num_groups=2, trained_share=0.3, vocab=100_000)
    overlap = batch.overlap()
    assert overlap.por == pytest.approx(por, abs=0.002)
    assert {len(row) for row in batch.rows} == {2_000}
    assert overlap.flat_head_tokens == pytest.approx(0.3 * overlap.flat_tokens, rel=0.05)
    branch_points = int((batch.forest().segments.num_children >= 2).sum())
    assert branch_points == 0 or branch_points > 8
    thinned = batch.for_gate().overlap()
    assert thinned.flat_tokens == 4_288 and thinned.por == pytest.approx(por, abs=0.02)
