"""verl's losses of actor and critic, by name."""

from functools import partial
from typing import Any

from verl.trainer.ppo.core_algos import POLICY_LOSS_REGISTRY
from verl.workers.config import FSDPActorConfig, FSDPCriticConfig
from verl.workers.config.actor import PolicyLossConfig
from verl.workers.utils.losses import ppo_loss, value_loss

AGG_MODES = ("token-mean", "token-sum", "seq-mean-token-sum", "seq-mean-token-mean", "seq-mean-token-sum-norm")
POLICY_LOSSES = sorted(set(POLICY_LOSS_REGISTRY) - {"bypass_mode"})
BATCH_LOSSES = frozenset({"geo_mean", "kl_cov", "clip_cov"})
"""They look at all rows of a micro-batch: trees are held against one micro-batch of all rows."""


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
