"""The loss of the TRL-style example, summed over trees, has the gradients of padded rows."""

from importlib import import_module
from pathlib import Path

import pytest
import torch

EXAMPLES = Path(__file__).parents[2] / "examples"


@pytest.mark.parametrize("loss_type, max_tokens", (("grpo", None), ("grpo", 7), ("dapo", 16)))
def test_trls_loss_has_the_gradients_of_padded_rows(
    loss_type: str, max_tokens: int | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.syspath_prepend(EXAMPLES)
    example = import_module("trl_style_trainer")
    options = example.TreeOptions(max_tokens=max_tokens)
    grpo = example.GRPOLoss(loss_type=loss_type)
    trainer = example.TreeGRPOTrainer(example.tiny_model(), grpo, lr=0.0, options=options)
    torch.manual_seed(1)
    inputs = example.generate(trainer)
    for name in ("old_per_token_logps", "ref_per_token_logps"):
        inputs[name] = inputs[name] + 0.2 * torch.randn_like(inputs[name])
    got = trainer.backward(inputs)

    rows_alone = example.tiny_model()
    ids = torch.cat([inputs["prompt_ids"], inputs["completion_ids"]], 1)
    logits = rows_alone(ids).logits[:, inputs["prompt_ids"].shape[1] - 1 : -1]
    logps = logits.log_softmax(-1).gather(-1, inputs["completion_ids"][..., None])[..., 0]
    loss = trainer.loss(inputs, logps, list(range(len(ids))))
    loss.backward()
    # Advantages of a group sum to zero, and so nearly does the loss.
    assert got == pytest.approx(loss.item(), rel=1e-5, abs=1e-6)
    for (name, expected), found in zip(rows_alone.named_parameters(), trainer.model.parameters(), strict=True):
        assert (found.grad - expected.grad).norm() <= 1e-5 * expected.grad.norm(), name
