"""How two engines are held against each other: verl's losses, one run, and the tolerances of the design."""

from functools import partial
from typing import Any

import pytest
import torch
from engine_harness import gradients
from tensordict import TensorDict
from verl.workers.config import FSDPActorConfig
from verl.workers.config.actor import PolicyLossConfig
from verl.workers.utils.losses import ppo_loss

GRADIENT_TOLERANCE = 1e-5
CANCELLING_TOLERANCE = 4e-5
LOG_PROB_TOLERANCE = 2e-5
LOSS_TOLERANCE = 1e-4


def actor_loss(loss_mode: str, agg_mode: str, *, kl: bool = True, entropy: float = 0.01) -> Any:
    """verl's loss with entropy and KL terms on."""
    config = FSDPActorConfig(
        strategy="fsdp2",
        rollout_n=1,
        ppo_micro_batch_size_per_gpu=1,
        loss_agg_mode=agg_mode,
        loss_scale_factor=17 if agg_mode == "seq-mean-token-sum-norm" else None,
        entropy_coeff=entropy,
        use_kl_loss=kl,
        kl_loss_coef=0.1,
        policy_loss=PolicyLossConfig(loss_mode=loss_mode, dro_beta=0.5),
    )
    return partial(ppo_loss, config=config)


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
    """Every parameter's gradient within the tolerances of the design, relative norm."""
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
