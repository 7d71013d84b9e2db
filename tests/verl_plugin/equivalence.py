"""How two engines are held against each other: one run, and the tolerances of the design."""

from typing import Any

import pytest
import torch
from engine_harness import ALONE, FLAGS, Row, gradients, ppo_batch
from tensordict import TensorDict
from verl_losses import actor_loss

from tree_rl.models.edge_head import EdgeHead

GRADIENT_TOLERANCE = 1e-5
CANCELLING_TOLERANCE = 4e-5
LOG_PROB_TOLERANCE = 2e-5
LOSS_TOLERANCE = 1e-4
LOSS = actor_loss("vanilla", "token-mean")


def run(engine: Any, data: TensorDict, loss: Any) -> dict[str, Any]:
    """One forward and backward with outputs kept, and the gradients it left."""
    engine.optimizer_zero_grad()
    torch.manual_seed(3)  # clip_cov draws the tokens it clips
    with engine.train_mode(disable_auto_offload=True):
        output = engine.forward_backward_batch(data, loss)
        result = {**output, "gradients": gradients(engine)}
    return result


def assert_equal_runs(stock: dict[str, Any], tree: dict[str, Any], wanted: torch.Tensor, keys: tuple[str, ...]) -> None:
    """Outputs, loss and every gradient within the tolerances of the design."""
    assert sum(tree["loss"]) == pytest.approx(sum(stock["loss"]), rel=LOSS_TOLERANCE, abs=1e-6)
    for key in keys:
        expected, got = (out["model_output"][key].values().cpu() for out in (stock, tree))
        torch.testing.assert_close(got[wanted], expected[wanted], rtol=LOG_PROB_TOLERANCE, atol=LOG_PROB_TOLERANCE)
    assert_equal_gradients(stock["gradients"], tree["gradients"])


def assert_equal_gradients(expected: dict[str, torch.Tensor], got: dict[str, torch.Tensor]) -> None:
    assert expected.keys() == got.keys()
    largest = max(gradient.norm() for gradient in expected.values())
    for name, reference in expected.items():
        error, norm = (got[name] - reference).norm(), reference.norm()
        # A gradient that cancels to nearly nothing is judged against the largest, where its rounding comes from.
        cancels = norm < 1e-2 * largest
        allowed = CANCELLING_TOLERANCE * max(norm, 1e-3 * largest) if cancels else GRADIENT_TOLERANCE * norm
        assert error <= allowed, (name, float(error), float(norm))


def wanted_positions(data: TensorDict) -> torch.Tensor:
    """bool [F]: positions whose next token is trained."""
    pieces = []
    for ids, mask in zip(data["input_ids"].unbind(), data["loss_mask"].unbind(), strict=True):
        full = torch.zeros(len(ids), dtype=torch.bool)
        full[len(ids) - len(mask) :] = mask.bool()
        pieces.append(torch.cat([full[1:], full.new_zeros(1)]))
    return torch.cat(pieces)


def alone(stock: Any, rows: list[Row], loss: Any = LOSS) -> dict[str, Any]:
    """Stock verl's update of rows, each in a micro-batch of its own."""
    return run(stock, ppo_batch(rows, **FLAGS, **ALONE), loss)


def assert_trains_as(
    expected: dict[str, Any], tree: Any, rows: list[Row], loss: Any = LOSS, **flags: Any
) -> dict[str, Any]:
    """An engine's update of rows is the expected one; returns it."""
    got = run(tree, ppo_batch(rows, **FLAGS, **flags), loss)
    assert_equal_runs(expected, got, wanted_positions(ppo_batch(rows)), ("log_probs", "entropy"))
    return got


def everywhere(rows: list[Row]) -> torch.Tensor:
    """bool [F]: every position, for values."""
    return torch.ones(sum(len(row.tokens) for row in rows), dtype=torch.bool)


def infer(engine: Any, data: TensorDict) -> dict[str, torch.Tensor]:
    with engine.eval_mode(disable_auto_offload=True):
        return {name: values.cpu() for name, values in engine.infer_batch(data)["model_output"].items()}


def answers_of_heads(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Names of the types with which heads answer from here on."""
    answers: list[str] = []
    forward = EdgeHead.forward

    def watching(head: EdgeHead, hidden: torch.Tensor) -> Any:
        answer = forward(head, hidden)
        answers.append(type(answer).__name__)
        return answer

    monkeypatch.setattr(EdgeHead, "forward", watching)
    return answers
