"""A plain torch loop trains on trees only after the first rows gave, as a tree, the outputs of a row alone."""

from typing import Any

import pytest
import torch
from measured_models import KINDS, build, hostile_rows

from tree_rl.training import EdgeOutputs, Rows, TreeOptions, TreeStep
from tree_rl.training.loss.outputs import LOG_PROBS, VALUES
from tree_rl.training.self_check import TreeMismatchError


def mean(outputs: EdgeOutputs, _: Any) -> tuple[torch.Tensor, dict[str, float]]:
    return next(iter(outputs.present().values())).mean(), {}


@pytest.mark.parametrize("kind", KINDS)
def test_the_first_update_is_checked(kind: str) -> None:
    step = TreeStep(build(kind), TreeOptions(max_tokens=100))
    step.run(Rows.of(hostile_rows()), mean, outputs=(VALUES if kind == "critic" else LOG_PROBS,), is_separable=True)
    assert step.self_check.error is not None and step.self_check.error < 2e-5


def test_a_model_that_mixes_siblings_is_stopped() -> None:
    model = build("dense", checkpointing=False)
    layer = model.model.layers[0].mlp
    forward = layer.forward

    def mixing(hidden: torch.Tensor) -> torch.Tensor:
        out = forward(hidden)
        return out + 0.5 * torch.cat([out[:, :1] * 0, out[:, :-1]], dim=1)

    layer.forward = mixing
    step = TreeStep(model)
    with pytest.raises(TreeMismatchError, match="self-check: log_probs of 1 rows differ"):
        step.run(Rows.of(hostile_rows()), mean)
    assert all(parameter.grad is None for parameter in model.parameters())


def test_mode_flat_is_refused_instead_of_training_trees() -> None:
    step = TreeStep(build("dense"), TreeOptions(mode="flat"))
    for call in (lambda: step.run(Rows.of(hostile_rows()), mean), lambda: step.infer(Rows.of(hostile_rows()))):
        with pytest.raises(ValueError, match=r"tree\.mode=flat needs a trainer that runs rows without a tree"):
            call()
