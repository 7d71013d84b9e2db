"""A budget takes the cheapest way that fits, and a smaller one never has a higher predicted peak."""

import math
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tree_rl.cost.cost_model import ModelShape
from tree_rl.cost.memory.budget import LARGEST_SCALE, LEAST_SCALE, working_scale
from tree_rl.cost.memory.choice import SLACK, Chooser, MemoryChoice, capacities
from tree_rl.cost.memory.model import GIB, MemoryModel
from tree_rl.cost.model_sizes import MODEL_SIZES
from tree_rl.training.memory.host import local_ranks
from tree_rl.tree.forest import Forest

SHAPE_8B = MODEL_SIZES["8b"].shape
H200 = 139 * GIB
MODEL_8B = MemoryModel(shape=SHAPE_8B, head_norms=True, logits_bytes=H200 / 64, chunk_tensors=1.5)
SHAPE = ModelShape(hidden=64, layers=3, intermediate=160, heads=4, kv_heads=2, head_dim=16, vocab=97)
TINY = MemoryModel(shape=SHAPE, value_bytes=4, head_norms=True, logits_bytes=1e4)
FORESTS = st.lists(st.lists(st.integers(1, 3), min_size=1, max_size=24), min_size=1, max_size=5).map(Forest.from_rows)


def forest_of(trunk: int, branches: int, tokens: int) -> Forest:
    draw = np.random.default_rng(0)
    shared = draw.integers(1, 400, trunk)
    rows = [np.concatenate([shared, [400 + i], draw.integers(1, 400, tokens - 1)]) for i in range(branches)]
    return Forest.from_rows(rows)


def choose(chooser: Chooser, forest: Forest, tokens: int) -> MemoryChoice:
    return chooser.choose(forest, tokens, head_share=0.5)


@pytest.mark.parametrize("fused", [False, True])
def test_a_deep_trunk_runs_whole_with_its_layer_inputs_on_the_host(fused: bool) -> None:
    forest = forest_of(131_072, 2, 8_192)
    model = replace(MODEL_8B, fused=fused)
    chooser = Chooser(model=model)
    auto = model.tokens_of(0.8 * H200 - 31 * GIB)
    whole = model.whole(forest.num_unique).device
    budgets = sorted([auto, 131_072, 65_536, 33_000, 16_384], reverse=True)
    chosen = [choose(chooser, forest, tokens) for tokens in budgets]
    assert [choice.peak.device for choice in chosen] == sorted((c.peak.device for c in chosen), reverse=True)
    assert all(choice.peak.device <= whole for choice in chosen)
    assert all(choice.plan is None for choice, tokens in zip(chosen, budgets, strict=True) if tokens >= 33_000)
    assert all(choice.saving.offloaded_layers for choice in chosen if choice is not chosen[0])
    # The fewest layers that suffice.
    layers = [choice.saving.offloaded_layers for choice in chosen[:2]]
    assert layers[0] == 0 < layers[1] < SHAPE_8B.layers


@pytest.mark.parametrize("offload", [False, True])
def test_a_wide_shallow_tree_runs_in_partitions_and_offload_decides_what_lies_on_the_host(offload: bool) -> None:
    forest = forest_of(4_000, 64, 2_000)
    chosen, smaller = (choose(Chooser(model=MODEL_8B, offload=offload), forest, tokens) for tokens in (33_000, 8_192))
    for choice in (chosen, smaller):
        assert choice.saving.relays_on_host is True if offload else choice.peak.host == 0
    if not offload:
        assert chosen.plan is not None and chosen.saving.offloaded_layers == 0
        assert chosen.peak.device <= MODEL_8B.bytes_of(33_000)
        assert chosen.plan.num_partitions <= 2 * math.ceil(forest.num_unique / 33_000)


def test_a_short_host_is_named_and_not_filled() -> None:
    forest = forest_of(131_072, 2, 8_192)
    chosen = choose(Chooser(model=MODEL_8B, host_bytes=4 * GIB), forest, 65_536)
    assert chosen.peak.host <= 4 * GIB < chosen.needs_host
    assert choose(Chooser(model=MODEL_8B), forest, 65_536).needs_host == 0


@settings(max_examples=15)
@given(
    forest=FORESTS, budgets=st.lists(st.integers(1, 120), min_size=2, max_size=4), host=st.sampled_from([0, 1e5, 1e9])
)
def test_a_smaller_budget_never_has_a_higher_predicted_peak(forest: Forest, budgets: list[int], host: float) -> None:
    chooser = Chooser(model=TINY, host_bytes=host)
    peaks = [choose(chooser, forest, tokens).peak for tokens in sorted(budgets)]
    assert [peak.device for peak in peaks] == sorted(peak.device for peak in peaks)
    assert all(peak.host <= host for peak in peaks)


@settings(max_examples=15)
@given(forest=FORESTS, tokens=st.integers(1, 120))
def test_a_budget_holds_what_it_chooses_unless_nothing_fits(forest: Forest, tokens: int) -> None:
    chooser = Chooser(model=TINY)
    chosen = choose(chooser, forest, tokens)
    least = chooser.choose(forest, 0, head_share=0.5)
    assert chosen.peak.device <= max(TINY.bytes_of(tokens), SLACK * least.peak.device)
    if forest.num_unique <= tokens:
        assert chosen.kind == (False, False, False, False)


def test_tokens_and_bytes_are_inverse_and_capacities_include_small_counts_and_powers_of_two() -> None:
    for tokens in (1, 1_000, 16_384, 1_000_000):
        assert MODEL_8B.tokens_of(MODEL_8B.bytes_of(tokens)) == tokens
    assert capacities(20) == [18, 16, *range(15, 0, -1)]
    assert {2**power for power in range(8, 17)} <= set(capacities(131_072))


def test_one_update_corrects_the_working_set() -> None:
    def predicted(model: MemoryModel) -> float:
        return model.whole(20_000).device

    measured = predicted(MODEL_8B.scaled(1.3))
    assert working_scale(MODEL_8B, predicted, measured) == pytest.approx(1.3, abs=0.01)
    assert working_scale(MODEL_8B, predicted, 100 * measured) == pytest.approx(LARGEST_SCALE)
    assert working_scale(MODEL_8B, lambda model: 0.0, measured) == LEAST_SCALE


def test_ranks_of_a_node_share_its_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("LOCAL_WORLD_SIZE", raising=False)
    monkeypatch.delenv("RAY_LOCAL_WORLD_SIZE", raising=False)
    assert (local_ranks(16, 8), local_ranks(2, 8), local_ranks(1, 0)) == (8, 2, 1)
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "4")
    assert local_ranks(16, 8) == 4
