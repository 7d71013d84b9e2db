"""A plain torch loop trains on trees only after the first rows gave, as a tree, the outputs of a row alone."""

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from equal_gradients import assert_equal_gradients
from measured_models import KINDS, build, hostile_rows
from torch.nn.parallel import DistributedDataParallel

from tree_rl.training import EdgeOutputs, Rows, StepContext, TreeOptions, TreeStep
from tree_rl.training.loss.outputs import ENTROPY, LOG_PROBS, VALUES
from tree_rl.training.self_check import TreeMismatchError


def mean(outputs: EdgeOutputs, _: Any) -> tuple[torch.Tensor, dict[str, float]]:
    return list(outputs.present().values())[-1].mean(), {}


@pytest.mark.parametrize("kind", KINDS)
def test_the_first_update_is_checked(kind: str) -> None:
    step = TreeStep(build(kind), TreeOptions(max_tokens=100))
    step.run(Rows.of(hostile_rows()), mean, outputs=(VALUES if kind == "critic" else LOG_PROBS,), is_separable=True)
    assert step.self_check.error is not None and step.self_check.error < 2e-5


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_model_that_mixes_siblings_is_stopped(dtype: torch.dtype) -> None:
    model = build("dense", checkpointing=False).to(dtype)
    layer = model.model.layers[0].mlp
    forward = layer.forward

    layer.forward = lambda hidden: (out := forward(hidden)) + 0.5 * out.roll(1, dims=1)
    step = TreeStep(model)
    with pytest.raises(TreeMismatchError, match="self-check: log_probs of 1 rows differ"):
        step.run(Rows.of(hostile_rows()), mean)
    assert all(parameter.grad is None for parameter in model.parameters())


def test_rounding_of_large_logits_in_bf16_stops_nothing() -> None:
    model = build("dense", checkpointing=False).to(torch.bfloat16)
    ids, trees = torch.tensor([hostile_rows()[0]]), model.config._attn_implementation
    with torch.no_grad():
        model.lm_head.weight *= 80.0 / model(ids).logits.abs().max()
        by_sdpa = model(ids).logits.float().log_softmax(-1)
        model.config._attn_implementation = "eager"
        by_eager = model(ids).logits.float().log_softmax(-1)
        model.config._attn_implementation = trees
    assert (by_sdpa - by_eager).abs().mean() > 0.05, "rows alone do not agree better"
    step = TreeStep(model)
    step.run(Rows.of(hostile_rows()), mean)
    assert step.self_check.error is not None and step.self_check.error > 0.05


def test_weights_that_are_no_numbers_are_not_blamed_on_trees() -> None:
    model = build("dense", checkpointing=False)
    with torch.no_grad():
        model.model.layers[0].mlp.down_proj.weight[0] = float("nan")
    with pytest.raises(TreeMismatchError, match="log_probs of rows that run without a tree are not finite"):
        TreeStep(model).run(Rows.of(hostile_rows()), mean)


def test_mode_flat_is_refused_instead_of_training_trees() -> None:
    step = TreeStep(build("dense"), TreeOptions(mode="flat"))
    for call in (lambda: step.run(Rows.of(hostile_rows()), mean), lambda: step.infer(Rows.of(hostile_rows()))):
        with pytest.raises(ValueError, match=r"tree\.mode=flat needs a trainer that runs rows without a tree"):
            call()


def test_a_wrapper_in_which_partitions_would_hang_is_refused() -> None:
    # Without its __init__, which needs a process group.
    wrapped = DistributedDataParallel.__new__(DistributedDataParallel)
    torch.nn.Module.__init__(wrapped)
    wrapped.module = build("dense")
    with pytest.raises(ValueError, match=r"^DistributedDataParallel expects a backward after each .*fully_shard"):
        TreeStep(wrapped)


def gradients(model: torch.nn.Module, *, inferred: bool = False, **options: Any) -> dict[str, torch.Tensor]:
    """Gradients of a loss that couples log-probs and entropies."""
    step = TreeStep(model, TreeOptions(**options))
    if inferred:
        step.infer(Rows.of(hostile_rows()))
    step.run(
        Rows.of(hostile_rows()),
        lambda outputs, _: (outputs[ENTROPY].sum() ** 2 / 100 + outputs[LOG_PROBS].sum() ** 2 / 100, {}),
        outputs=(LOG_PROBS, ENTROPY),
    )
    return {name: one.grad for name, one in model.named_parameters() if one.grad is not None}


FROZEN = {
    "nothing": (),
    "embedding": ("embed_tokens",),
    "lower layer": ("embed_tokens", "layers.0."),
    "keys and values": ("embed_tokens", "k_proj", "v_proj"),
    "all but the head": ("embed_tokens", "layers", "model.norm"),
}


@pytest.mark.parametrize("frozen", FROZEN)
@pytest.mark.parametrize("checkpointing", (False, True))
def test_partitions_of_partly_frozen_models_have_the_gradients_of_the_whole(frozen: str, checkpointing: bool) -> None:
    def built() -> torch.nn.Module:
        model = build("dense", checkpointing=checkpointing)
        for name, parameter in model.named_parameters():
            parameter.requires_grad_(not any(part in name for part in FROZEN[frozen]))
        return model

    expected = gradients(built(), mode="tree")
    for tokens, inferred in ((3, False), (16, True)):
        got = gradients(built(), inferred=inferred, max_tokens=tokens)
        assert got.keys() == expected.keys() and got
        assert_equal_gradients(got, expected, floor=0.0)


def test_a_loss_of_entropies_alone_also_runs_in_partitions() -> None:
    found = []
    for tokens in (10_000, 16):
        model = build("dense", checkpointing=False)
        TreeStep(model, TreeOptions(max_tokens=tokens)).run(Rows.of(hostile_rows()), mean, outputs=(ENTROPY,))
        found.append([one.grad for one in model.parameters()])
    assert_equal_gradients(*found)


def test_reentrant_checkpointing_is_refused_in_partitions() -> None:
    model = build("dense", checkpointing=False)
    model.gradient_checkpointing_enable({"use_reentrant": True})
    model.enable_input_require_grads()
    with pytest.raises(ValueError, match="under reentrant gradient checkpointing: set use_reentrant=False"):
        gradients(model, max_tokens=16)


def test_a_layer_that_runs_twice_is_refused_in_partitions() -> None:
    model = build("dense", checkpointing=False)
    layer = model.model.layers[0]
    forward = layer.forward
    layer.forward = lambda hidden, **keywords: forward(forward(hidden, **keywords), **keywords)
    gradients(model, max_tokens=10_000)
    with pytest.raises(ValueError, match="layer 0 runs more than once in a forward"):
        gradients(model, max_tokens=16)


def test_options_and_rows_for_experts_act_or_are_refused() -> None:
    rows, counted = Rows.of(hostile_rows()), []
    for coef in (None, 0.0, 100.0):
        model = build("experts", checkpointing=False)
        TreeStep(model, TreeOptions(router_aux_loss_coef=coef)).run(rows, mean)
        counted.append(torch.cat([one.grad.flatten() for one in model.parameters() if one.grad is not None]))
    # A coefficient of zero only counts.
    assert torch.equal(counted[0], counted[1]) and not torch.allclose(counted[0], counted[2])
    step = TreeStep(model)
    routed = replace(rows, routes_FLK=np.zeros((len(rows.token_ids_F), 2, 2), dtype=np.int16))
    for call in (lambda: step.run(rows, mean, records_routes=True), lambda: step.infer(routed)):
        with pytest.raises(ValueError, match=r"by StepContext\.routers: expected RouterHooks, received None"):
            call()
    with pytest.raises(ValueError, match=r"router_aux_loss_coef needs StepContext\.routers"):
        TreeStep(model, TreeOptions(router_aux_loss_coef=0.1), context=StepContext.of(model))
