"""How two engines are held against each other: verl's losses, one run, and the tolerances of the design."""

from functools import partial
from typing import Any

import pytest
import torch
from engine_harness import Row, gradients, ppo_batch
from tensordict import TensorDict
from verl.trainer.ppo.core_algos import POLICY_LOSS_REGISTRY
from verl.workers.config import FSDPActorConfig, FSDPCriticConfig
from verl.workers.config.actor import PolicyLossConfig
from verl.workers.utils.losses import ppo_loss, value_loss
from verl.workers.utils.padding import response_from_nested

from tree_rl.models.edge_head import EdgeHead
from tree_rl.verl_plugin.engine.verl_loss import REUSE_LOG_PROBS

FLAGS = {"calculate_entropy": True, "return_model_output": True}
"""Of a batch whose outputs are compared."""
ALONE = {"use_dynamic_bsz": False, "micro_batch_size_per_gpu": 1}
"""Of a batch that stock verl runs row by row."""
AGG_MODES = ("token-mean", "token-sum", "seq-mean-token-sum", "seq-mean-token-mean", "seq-mean-token-sum-norm")
POLICY_LOSSES = sorted(set(POLICY_LOSS_REGISTRY) - {"bypass_mode"})
BATCH_LOSSES = frozenset({"geo_mean", "kl_cov", "clip_cov"})
"""They look at all rows of a micro-batch: trees are held against one micro-batch of all rows."""
LORA = {"lora_rank": 4, "lora_alpha": 8, "target_modules": ["q_proj", "v_proj", "up_proj"]}
GRADIENT_TOLERANCE = 1e-5
CANCELLING_TOLERANCE = 4e-5
LOG_PROB_TOLERANCE = 2e-5
LOSS_TOLERANCE = 1e-4


def actor_loss(
    loss_mode: str, agg_mode: str, *, kl: bool = True, policy: dict[str, Any] | None = None, **options: Any
) -> Any:
    """verl's loss with entropy and KL terms on; options of `policy_loss` and of the actor win."""
    usual = {"strategy": "fsdp2", "rollout_n": 1, "ppo_micro_batch_size_per_gpu": 1, "loss_agg_mode": agg_mode}
    usual |= {"entropy_coeff": 0.01, "use_kl_loss": kl, "kl_loss_coef": 0.1}
    if agg_mode == "seq-mean-token-sum-norm":
        usual["loss_scale_factor"] = 17
    policy_loss = PolicyLossConfig(**{"loss_mode": loss_mode, "dro_beta": 0.5, **(policy or {})})
    return partial(ppo_loss, config=FSDPActorConfig(**{**usual, "policy_loss": policy_loss, **options}))


def critic_loss(agg_mode: str = "token-mean", **options: Any) -> Any:
    shared = {"strategy": "fsdp2", "ppo_micro_batch_size_per_gpu": 1}
    return partial(value_loss, config=FSDPCriticConfig(**shared, loss_agg_mode=agg_mode, **options))


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


def run_after_pass(engine: Any, rows: list[Row], loss: Any, **flags: Any) -> dict[str, Any]:
    data = ppo_batch(rows, **flags)
    data["old_log_probs"] = response_from_nested(infer(engine, ppo_batch(rows))["log_probs"], data["response_mask"])
    return run(engine, data, loss)


def without_pass(rows: list[Row], **flags: Any) -> Any:
    data = ppo_batch(rows, **{REUSE_LOG_PROBS: True, **flags})
    del data["old_log_probs"]
    return data
