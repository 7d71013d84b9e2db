"""Load, auxiliary loss and bias balancing of a forest are those of its rows: each unique token counts g_t times."""

from dataclasses import replace
from itertools import product
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from equal_gradients import gradients
from hypothesis import given, settings
from hypothesis import strategies as st
from moe_models import BIASED, EXPERTS, FAMILIES, LAYERS, SIZES, SPARSE, assert_equal_gradients, build, prepared
from partitioned_steps import partitioned_gradients
from stock_routers import auxiliary_loss
from tiny_sizes import BRANCHING
from transformers import MellumConfig, PretrainedConfig

from tree_rl.models import UnsupportedModelError, use_tree_attention
from tree_rl.models.routers.load_balance import balance_loss, balance_weight
from tree_rl.models.routers.trace import RouterHooks, RouterTrace
from tree_rl.models.tree_inputs import TreeInputs
from tree_rl.training import StepContext, TreeOptions, TreeStep
from tree_rl.training.routers.forest_routing import ForestRouting
from tree_rl.tree.forest import Forest

ROWS = BRANCHING["branches"] + BRANCHING["identical_and_strict_prefix"] + BRANCHING["single_tokens"]


def tree_forward(
    model: torch.nn.Module, rows: list[list[int]], weight_LE: torch.Tensor | None = None
) -> tuple[ForestRouting, RouterTrace, Any]:
    """One forward of the forest of the rows, and its share of the auxiliary loss."""
    forest = Forest.from_rows(rows)
    routing = ForestRouting(forest, weight_LE=weight_LE)
    trace = routing.open()
    model(**TreeInputs.from_forest(forest, router_trace=trace).model_kwargs())
    return routing, trace, routing.close(trace)


@pytest.mark.parametrize("family, checkpointing", [(family, at % 2 == 0) for at, family in enumerate(FAMILIES)])
def test_auxiliary_losses_of_forests_add_up_to_that_of_the_padded_rows(family: str, checkpointing: bool) -> None:
    expected = auxiliary_loss(stock := build(FAMILIES[family]), ROWS)
    wanted = gradients(stock, expected)
    model, _ = prepared(family, checkpointing=checkpointing)
    # Ranks and micro-batches: each runs its own forest, the load is everybody's.
    for shares in ([ROWS], [ROWS[:3], ROWS[3:5], ROWS[5:]]):
        load_LE = torch.stack([tree_forward(model, share)[0].load(EXPERTS) for share in shares]).sum(0)
        weight_LE = balance_weight(load_LE, sum(map(len, ROWS)))
        got = torch.stack([tree_forward(model, share, weight_LE)[2] for share in shares]).sum()
        torch.testing.assert_close(got, expected.detach(), rtol=1e-6, atol=1e-6)
        assert_equal_gradients(gradients(model, got), wanted)


def test_a_recomputation_leaves_no_graph_behind() -> None:
    model, _ = prepared("mixtral", checkpointing=True)
    _, trace, share = tree_forward(model, ROWS, torch.ones(LAYERS, EXPERTS))
    share.backward()
    assert [logits.grad_fn for logits in trace.take_logits()] == [None] * LAYERS


@pytest.mark.parametrize("family, capacity", (("qwen3_moe_dense_layer", 8), ("gpt_oss", 1)))
def test_partitions_keep_the_auxiliary_loss(family: str, capacity: int) -> None:
    forest, (model, _) = Forest.from_rows(ROWS), prepared(family)
    routing = ForestRouting(forest)

    def charge() -> None:
        routing.weight_LE = balance_weight(routing.load(EXPERTS), forest.num_flat)

    how = {"preview": True, "after_preview": charge, "routing": routing}
    got = partitioned_gradients(model, forest, capacity, lambda log_probs_F: 0 * log_probs_F.sum(), **how)
    stock = build(FAMILIES[family])
    assert_equal_gradients(got, gradients(stock, auxiliary_loss(stock, ROWS)))


UNREADABLE: dict[str, PretrainedConfig] = {
    "Glm4MoeDecoderLayer": BIASED,
    "MellumDecoderLayer": MellumConfig(**SIZES, **SPARSE, sliding_window=3),
}


@pytest.mark.parametrize("layer", UNREADABLE)
def test_a_router_whose_logits_cannot_be_read_only_counts(layer: str) -> None:
    model = build(UNREADABLE[layer])
    use_tree_attention(model)
    context = replace(StepContext.of(model), routers=RouterHooks(model))
    TreeStep(model, TreeOptions(router_aux_loss_coef=0.0), context=context)
    with pytest.raises(UnsupportedModelError, match=rf"router_aux_loss_coef=0\.5: the router logits of {layer} cannot"):
        TreeStep(model, TreeOptions(router_aux_loss_coef=0.5), context=context)


@settings(max_examples=30, deadline=None)
@given(
    rows=st.lists(st.lists(st.integers(0, 2), min_size=1, max_size=7), min_size=1, max_size=7), seed=st.integers(0, 999)
)
def test_any_forest_counts_like_its_rows(rows: list[list[int]], seed: int) -> None:
    forest = Forest.from_rows(rows)
    chosen = torch.from_numpy(np.random.default_rng(seed).integers(0, 4, (forest.num_unique, 2, 3)).astype(np.int16))

    routing = ForestRouting(forest)
    routing.close(SimpleNamespace(chosen=lambda: chosen, take_logits=list))
    naive = torch.zeros(len(rows), 2, 4, dtype=torch.float64)
    for row, layer in product(range(len(rows)), range(2)):
        for expert in chosen[forest.row_index[row], layer].flatten().tolist():
            naive[row, layer, expert] += 1
    assert torch.equal(routing.load_of_rows(4), naive)
    assert torch.equal(routing.load(4), naive.sum(0))


def test_probabilities_of_all_layers_are_not_kept_for_the_backward() -> None:
    logits_NE = torch.randn(1000, 64, requires_grad=True) * 1.0
    kept: dict[int, int] = {}

    def keep(tensor: torch.Tensor) -> torch.Tensor:
        kept[tensor.data_ptr()] = tensor.nbytes
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        balance_loss([logits_NE], torch.ones(1000), torch.ones(1, 64))
    kept.pop(logits_NE.data_ptr(), None)
    assert sum(kept.values()) < logits_NE.nbytes / 2
