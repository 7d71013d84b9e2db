"""Models with Gated DeltaNet layers in partitions of any size: states cross cuts, gradients are those of the rows."""

from typing import Any

import numpy as np
import pytest
import torch
from hybrid_models import HYBRIDS, build, float64_throughout, rows_with_prefix
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers import Qwen3NextConfig

from tree_rl.models import use_tree_attention
from tree_rl.training.loss.edges import plan_edges
from tree_rl.training.loss.outputs import EdgeOutputs
from tree_rl.training.loss.readout import EdgeReadout
from tree_rl.training.partitioned import PartitionedRun, inference_ops, training_ops
from tree_rl.training.rows_alone import branch_log_probs
from tree_rl.training.whole import wanted_everywhere
from tree_rl.tree.forest import Forest
from tree_rl.tree.partition import plan_partitions

CPU = torch.device("cpu")
ROWS = st.lists(st.lists(st.integers(1, 4), min_size=1, max_size=12), min_size=1, max_size=5)
TWO_LAYERS = Qwen3NextConfig(
    **{
        **HYBRIDS["qwen3_next"].to_dict(),
        "num_hidden_layers": 2,
        "layer_types": ["linear_attention", "full_attention"],
        "mlp_only_layers": [0, 1],
    }
)
Gradients = dict[str, torch.Tensor]


def row_gradients(model: Any, rows: list[Any]) -> Gradients:
    """Of the sum of squared log-probs, every row alone."""
    parameters = dict(model.named_parameters())
    loss = branch_log_probs(model, rows).square().sum()
    gradients = torch.autograd.grad(loss, parameters.values(), allow_unused=True, materialize_grads=True)
    return dict(zip(parameters, gradients, strict=True))


def partitioned_gradients(
    model: Any, rows: list[Any], capacity: int, *, offload: bool = False, preview: bool = False
) -> Gradients:
    """The same through one partitioned step."""
    forest = Forest.from_rows(rows)
    plan = plan_partitions(forest, capacity, solver="heuristic")
    edges = plan_edges(forest, wanted_everywhere(forest), np.ones(len(rows), dtype=np.float32))
    readout = EdgeReadout(plan, edges, device=CPU)

    def slot_gradients(values: EdgeOutputs) -> EdgeOutputs:
        leaf = values["log_probs"].clone().requires_grad_()
        loss = readout.flat(EdgeOutputs(log_probs=leaf))["log_probs"].square().sum()
        return EdgeOutputs(log_probs=torch.autograd.grad(loss, leaf)[0])

    run = PartitionedRun(model, forest, plan, readout, offload=offload)
    model.zero_grad()
    if preview:
        assert "".join(run.infer(preview=True)) == inference_ops(run.plan)
    assert "".join(run.train(slot_gradients)) == training_ops(run.plan)
    assert run.count.forward == run.count.backward == forest.num_unique
    named = model.named_parameters()
    return {name: torch.zeros_like(p) if p.grad is None else p.grad.clone() for name, p in named}


def assert_same(got: Gradients, expected: Gradients, tolerance: float = 1e-10) -> None:
    scale = max(float(gradient.norm()) for gradient in expected.values()) or 1.0
    for name, reference in expected.items():
        error = float((got[name] - reference).norm()) / max(float(reference.norm()), 1e-3 * scale)
        assert error < tolerance, (name, error)


@pytest.mark.parametrize("capacity", (3, 5, 17, 64, 10_000))
def test_every_budget_in_float64(capacity: int) -> None:
    rows = rows_with_prefix(20)
    with float64_throughout():
        model = build(HYBRIDS["qwen3_next"], torch.float64)
        expected = row_gradients(model, rows)
        use_tree_attention(model)
        assert_same(partitioned_gradients(model, rows, capacity, preview=capacity == 5), expected)


@pytest.mark.parametrize(("family", "capacity"), (("qwen3_5", 3), ("qwen3_5_moe", 40)))
def test_other_families_with_checkpointing_and_offloading(family: str, capacity: int) -> None:
    rows = rows_with_prefix(30)
    with float64_throughout():
        model = build(HYBRIDS[family], torch.float64)
        expected = row_gradients(model, rows)
        use_tree_attention(model)
        model.gradient_checkpointing_enable({"use_reentrant": False})
        assert_same(partitioned_gradients(model, rows, capacity, offload=True), expected)


@pytest.fixture(scope="module")
def two_layers() -> Any:
    model = build(TWO_LAYERS, torch.float64)
    return model


@settings(max_examples=25, deadline=None, database=None)
@given(rows=ROWS, capacity=st.integers(1, 30), seed=st.integers(0, 2**16))
def test_any_rows_any_budget(two_layers: Any, rows: list[list[int]], capacity: int, seed: int) -> None:
    with float64_throughout():
        expected = row_gradients(two_layers, rows)
        use_tree_attention(two_layers)
        assert_same(partitioned_gradients(two_layers, rows, capacity, offload=seed % 2 == 0), expected)


@pytest.mark.parametrize(("family", "capacity"), (("qwen3_next", 30), ("qwen3_next", 3), ("qwen3_5", 3)))
def test_float32_partitions_equal_rows_in_float64(family: str, capacity: int) -> None:
    rows = rows_with_prefix(65)
    with float64_throughout():
        expected = row_gradients(build(HYBRIDS[family], torch.float64), rows)
    model = build(HYBRIDS[family], torch.float32)
    use_tree_attention(model)
    assert_same(partitioned_gradients(model, rows, capacity), expected, 2e-5)


def test_two_runs_of_one_plan_are_bitwise_equal() -> None:
    model = build(HYBRIDS["qwen3_next"], torch.float32)
    use_tree_attention(model)
    first, second = (partitioned_gradients(model, rows_with_prefix(20), 9) for _ in range(2))
    assert all(torch.equal(gradient, second[name]) for name, gradient in first.items())
