"""Models with experts on trees: gradients are those of rows alone, whatever computes the experts and with routes that
are replayed; recorded routes replay to the same numbers."""

import moe_models
import numpy as np
import pytest
import torch
from dense_models import FAMILIES as DENSE
from dense_models import assert_reads_trees
from equal_gradients import gradients
from moe_models import BIASED, EXPERTS, FAMILIES, LATENT, LAYERS, PER_TOKEN, REPLAYABLE, SIZES, build, prepared
from partitioned_steps import partitioned_gradients
from stock_routers import stock_routers_told
from tiny_sizes import BRANCHING, changed
from transformers import Dots1Config, OlmoeConfig, PhimoeConfig, PretrainedConfig

from tree_rl.models import UnsupportedModelError, use_tree_attention
from tree_rl.models.routers.merge_routes import NATIVE, number_routes, routes_of_unique_tokens
from tree_rl.models.routers.trace import RouterHooks, RouterTrace
from tree_rl.models.tree_inputs import TreeInputs
from tree_rl.training.loss.edges import forest_log_probs, plan_edges, tree_log_probs, wanted_everywhere
from tree_rl.training.routers.forest_routing import ForestRouting
from tree_rl.training.rows_alone import branch_log_probs
from tree_rl.tree.forest import Forest

Rows = list[list[int]]
ROWS = BRANCHING["branches"] + BRANCHING["identical_and_strict_prefix"] + BRANCHING["single_tokens"]


def replayed_forest(rows: Rows, routes: list[np.ndarray]) -> tuple[Forest, ForestRouting]:
    routes_FLK, ends = np.concatenate(routes), np.cumsum([len(row) for row in rows])
    forest = Forest.from_rows(rows, merge_key=np.split(number_routes(routes_FLK), ends[:-1]))
    return forest, ForestRouting(forest, routes=routes_of_unique_tokens(forest, routes_FLK))


def traced_log_probs(model: torch.nn.Module, forest: Forest, trace: RouterTrace) -> torch.Tensor:
    edges = plan_edges(forest, wanted_everywhere(forest), np.ones(forest.num_rows, dtype=np.float32))
    return tree_log_probs(model, TreeInputs.from_forest(forest, router_trace=trace), lambda: edges)["log_probs"]


def row_log_probs(family: str, rows: Rows, routes: list[np.ndarray]) -> tuple[torch.nn.Module, torch.Tensor]:
    """Each row alone through stock code with its top-k replaced."""
    model = build(REPLAYABLE[family])
    pieces = []
    for row, routes_TLK in zip(rows, routes, strict=True):
        with stock_routers_told([routes_TLK[:, list(moe_models.LAYERS_WITH_EXPERTS[family])]], EXPERTS):
            pieces.append(branch_log_probs(model, [row]))
    return model, torch.cat(pieces)


@pytest.mark.parametrize(
    ("family", "rows", "checkpointing", "is_recorded"),
    (
        *((family, ROWS, at % 2 == 0, True) for at, family in enumerate(REPLAYABLE)),
        *(("mixtral", BRANCHING[shape], False, False) for shape in ("comb", "single_tokens")),
    ),
)
def test_replay_equals_rows_alone_and_tokens_without_a_record_are_routed_by_the_model(
    family: str, rows: Rows, checkpointing: bool, is_recorded: bool
) -> None:
    routes = moe_models.random_routes(rows, seed=1)
    if not is_recorded:
        for routes_TLK in routes:
            routes_TLK[-1] = NATIVE
            routes_TLK[::3, 1] = NATIVE
    stock, log_probs_F = row_log_probs(family, rows, routes)
    expected = gradients(stock, moe_models.weighted(log_probs_F))
    model, _ = prepared(family, checkpointing=checkpointing)
    forest, routing = replayed_forest(rows, routes)
    assert not is_recorded or Forest.from_rows(rows).num_unique < forest.num_unique < forest.num_flat
    got_F = traced_log_probs(model, forest, routing.open())
    torch.testing.assert_close(got_F, log_probs_F, rtol=1e-5, atol=1e-5)
    moe_models.assert_equal_gradients(gradients(model, moe_models.weighted(got_F)), expected)


@pytest.mark.parametrize("family, capacity", (("qwen3_moe", 1), ("gpt_oss", 11), ("deepseek_v3", 3)))
def test_replay_in_partitions_equals_rows_alone(family: str, capacity: int) -> None:
    routes = moe_models.random_routes(ROWS, seed=2)
    stock, log_probs_F = row_log_probs(family, ROWS, routes)
    weight_F = torch.randn(len(log_probs_F), generator=torch.Generator().manual_seed(0))
    expected = gradients(stock, (log_probs_F * weight_F).sum())
    model, _ = prepared(family, checkpointing=True)
    forest, routing = replayed_forest(ROWS, routes)
    got = partitioned_gradients(
        model, forest, capacity, lambda log_probs_F: (log_probs_F * weight_F).sum(), routing=routing
    )
    moe_models.assert_equal_gradients(got, expected)
    recorded = [np.sort(routing.chosen[forest.row_index[row]].numpy()) for row in range(len(ROWS))]
    for got_TLK, forced_TLK in zip(recorded, routes, strict=True):
        assert np.array_equal(got_TLK, np.sort(forced_TLK[:, moe_models.LAYERS_WITH_EXPERTS[family]]))


def routes_of(trace: RouterTrace, hooks: RouterHooks) -> torch.Tensor:
    """Experts that ran, int16 [N, L, K] by absolute decoder layer; NATIVE in layers without experts."""
    chosen = trace.chosen()
    routes_NLK = chosen.new_full((len(chosen), hooks.num_layers, chosen.shape[-1]), NATIVE)
    routes_NLK[:, list(hooks.layers)] = chosen
    return routes_NLK


@pytest.mark.parametrize("family", REPLAYABLE)
def test_what_a_forest_records_is_what_its_rows_choose_and_replays_to_itself(family: str) -> None:
    model, hooks = prepared(family)
    forest = Forest.from_rows(ROWS)
    trace = ForestRouting(forest).open()
    log_probs_F = traced_log_probs(model, forest, trace)
    routes_NLK = routes_of(trace, hooks)
    for row, ids in enumerate(ROWS):
        alone = RouterTrace()
        model(input_ids=torch.tensor([ids]), use_cache=False, router_trace=alone)
        assert torch.equal(routes_NLK[forest.row_index[row]].sort(-1).values, routes_of(alone, hooks).sort(-1).values)
    recorded = [routes_NLK[forest.row_index[row]].numpy() for row in range(len(ROWS))]
    again, routing = replayed_forest(ROWS, recorded)
    assert again.num_unique == forest.num_unique
    torch.testing.assert_close(traced_log_probs(model, again, routing.open()), log_probs_F, rtol=0, atol=0)


@pytest.mark.parametrize("family", ("qwen3_moe", "deepseek_v3"))
def test_forwards_without_a_trace_are_not_touched(family: str) -> None:
    model, _ = prepared(family)
    ids = torch.tensor([ROWS[0]])
    before = model(input_ids=ids).logits
    forced = torch.from_numpy(moe_models.random_routes(ROWS[:1], seed=4)[0])
    changed = model(input_ids=ids, router_trace=RouterTrace(forced)).logits
    assert not torch.allclose(changed, before, atol=1e-2)
    torch.testing.assert_close(model(input_ids=ids).logits, before, rtol=0, atol=0)


@pytest.mark.parametrize(
    ("layers", "complaint"),
    (
        (LAYERS - 1, r"expected routes of all 3 decoder layers .* received 2"),
        (LAYERS, r"routes of layer 0 .* expected \(3, 2\), received \(2, 2\)"),
    ),
)
def test_routes_of_other_layers_or_tokens_are_refused(layers: int, complaint: str) -> None:
    model, _ = prepared("qwen3_moe_dense_layer")
    with pytest.raises(ValueError, match=complaint):
        model(input_ids=torch.tensor([[3, 4, 5]]), router_trace=RouterTrace(torch.zeros(2, layers, PER_TOKEN)))


def test_routers_whose_scores_are_unknown_record_but_do_not_replay() -> None:
    experts = {"n_routed_experts": 5, "n_shared_experts": 1, "moe_intermediate_size": 16, "first_k_dense_replace": 1}
    model = build(Dots1Config(**SIZES, **experts))
    RouterHooks(model)
    trace = RouterTrace()
    model(input_ids=torch.tensor([[3, 4]]), router_trace=trace)
    assert trace.chosen().shape == (2, LAYERS - 1, PER_TOKEN)
    with pytest.raises(UnsupportedModelError, match="routes cannot be replayed through Dots1DecoderLayer"):
        model(input_ids=torch.tensor([[3, 4]]), router_trace=RouterTrace(torch.zeros(2, LAYERS, PER_TOKEN)))


def test_a_dense_model_has_no_routers() -> None:
    with pytest.raises(UnsupportedModelError, match="LlamaForCausalLM has no experts"):
        RouterHooks(build(DENSE["llama"]))


IN_MASK = {"use_sliding_window": True, "sliding_window": 4, "max_window_layers": 3, "layer_types": None}
WINDOWS: dict[str, PretrainedConfig] = {
    "qwen2_moe_window": changed(FAMILIES["qwen2_moe"], **IN_MASK),
    "phimoe_window": PhimoeConfig(**SIZES, num_local_experts=EXPERTS, sliding_window=4, router_jitter_noise=0.0),
    "olmoe_window": OlmoeConfig(**SIZES, num_experts=EXPERTS, sliding_window=4),
}
"""Windows that only the mask has (Qwen2-MoE, PhiMoE), or only the layer's keyword (OLMoE)."""
WITH_LATENT = {**FAMILIES, **WINDOWS, "glm4_moe": BIASED, **LATENT}
WITH_EXPERTS = [family for family in WITH_LATENT if family != "youtu"]


@pytest.mark.parametrize(
    ("family", "shape"),
    sorted(
        {(family, list(BRANCHING)[at % len(BRANCHING)]) for at, family in enumerate(WITH_LATENT)}
        | {(family, shape) for family in ("qwen3_moe", *LATENT) for shape in BRANCHING}
        | {(family, "branches") for family in WINDOWS}
    ),
)
def test_forest_equals_rows_alone(family: str, shape: str) -> None:
    assert_reads_trees(build(WITH_LATENT[family], dtype=torch.float64), BRANCHING[shape])


@pytest.mark.parametrize(
    "family, experts", [(f, ("grouped_mm", "batched_mm")[at % 2]) for at, f in enumerate(WITH_EXPERTS)]
)
def test_every_experts_implementation(family: str, experts: str) -> None:
    rows = BRANCHING["branches"] + BRANCHING["identical_and_strict_prefix"]
    reference = build(WITH_LATENT[family])
    expected = gradients(reference, moe_models.weighted(branch_log_probs(reference, rows)))
    model = build(WITH_LATENT[family], experts=experts)
    use_tree_attention(model)
    got = gradients(model, moe_models.weighted(forest_log_probs(model, Forest.from_rows(rows))))
    moe_models.assert_equal_gradients(got, expected)
