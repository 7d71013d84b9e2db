"""A correction against stale rollouts either happens or is refused with its key."""

from typing import Any

import pytest
from omegaconf import DictConfig, OmegaConf

from tree_rl.verl_plugin.refusals.refusal import Of, UnsupportedFeatureError
from tree_rl.verl_plugin.refusals.table import refuse_if_unsupported


def config(*, log_probs: bool = True, loss_mode: str = "vanilla", **correction: Any) -> DictConfig:
    settings = {"rollout_is": None, "rollout_rs": None, "bypass_mode": False, "loss_type": "ppo_clip", **correction}
    return OmegaConf.create(
        {
            "algorithm": {"rollout_correction": settings},
            "actor_rollout_ref": {
                "rollout": {"calculate_log_probs": log_probs},
                "actor": {"policy_loss": {"loss_mode": loss_mode}},
            },
        }
    )


@pytest.mark.parametrize(
    "asked",
    [{"rollout_is": "token"}, {"rollout_rs": "token_k1"}, {"bypass_mode": True}],
    ids=lambda asked: next(iter(asked)),
)
def test_a_correction_without_the_rollouts_log_probs_is_refused(asked: dict[str, Any]) -> None:
    key = next(iter(asked))
    with pytest.raises(
        UnsupportedFeatureError, match=rf"rollout_correction\.{key}=.*rollout\.calculate_log_probs=False"
    ):
        refuse_if_unsupported(config(log_probs=False, **asked), "", Of.JOB)


@pytest.mark.parametrize("dropped", [{"loss_type": "reinforce"}, {"rollout_rs": "token_k1"}])
def test_what_bypass_mode_leaves_to_the_loss_needs_that_loss(dropped: dict[str, Any]) -> None:
    with pytest.raises(UnsupportedFeatureError, match=r"policy_loss\.loss_mode=vanilla ignores it"):
        refuse_if_unsupported(config(bypass_mode=True, **dropped), "", Of.JOB)
    refuse_if_unsupported(config(bypass_mode=True, loss_mode="bypass_mode", **dropped), "", Of.JOB)


def test_corrections_that_happen_pass() -> None:
    refuse_if_unsupported(config(), "", Of.JOB)
    refuse_if_unsupported(config(log_probs=False), "", Of.JOB)
    refuse_if_unsupported(config(rollout_is="sequence", rollout_rs="seq_max_k2"), "", Of.JOB)
    refuse_if_unsupported(config(bypass_mode=True), "", Of.JOB)
    refuse_if_unsupported(config(bypass_mode=True, rollout_is="token"), "", Of.JOB)
    without = config()
    without.algorithm.rollout_correction = None
    refuse_if_unsupported(without, "", Of.JOB)
