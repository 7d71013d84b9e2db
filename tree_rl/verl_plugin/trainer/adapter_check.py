"""Detects a LoRA adapter that never reached the rollout, which raises no error by itself.

The rollout's log-probs then equal the trainer's without the adapter instead of those with it. Until an update has moved
the adapter from zero, the two are the same and nothing can be detected.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from omegaconf import DictConfig, OmegaConf

from tree_rl.verl_plugin.options import ENGINES, as_tree_config

SHARE = "tree/adapter_in_rollout"
"""Metric: share of the adapter's effect on log-probs that the rollout's log-probs have."""
MISSING, ARRIVED = 0.25, 0.75
"""Shares below and above which the adapter is missing or there; rounding alone, without any effect, gives 0.5."""
DEVIATIONS = 4.0
"""Standard deviations by which a share must be beyond these."""
UPDATES_PER_STALE_VERSION = 8
"""Least updates for each version by which a row is stale: early adapters grow much from one version to the next."""


class AdapterMissingError(RuntimeError):
    """The rollout samples from the model without its adapter; training on its rows would be wrong."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Effect:
    """The adapter's effect on log-probs, as far as the rollout shows it."""

    share: float
    """1 if the rollout has all of it, 0 if none."""
    deviation: float
    """Standard deviation of the share."""
    per_token: float
    """Root mean square of the whole effect on a token's log-prob."""

    @classmethod
    def of(cls, rollout_N: torch.Tensor, adapted_N: torch.Tensor, base_N: torch.Tensor) -> "Effect | None":
        """From the log-probs of N trained tokens; None if the adapter changes none of them."""
        # Rows share tokens, whose rounding errors are the same: each counts once.
        values_3M = torch.stack([rollout_N, adapted_N, base_N]).double().unique(dim=1)
        # An offset of all, such as a padded vocabulary's, is no effect of the adapter.
        rollout_M, adapted_M, base_M = values_3M - values_3M.mean(dim=1, keepdim=True)
        effect_M, shown_M = adapted_M - base_M, rollout_M - base_M
        square = float(effect_M.square().sum())
        if square == 0.0:
            return None
        share = float(effect_M @ shown_M) / square
        deviation = float((effect_M * (shown_M - share * effect_M)).norm()) / square
        return cls(share=share, deviation=deviation, per_token=math.sqrt(square / len(effect_M)))

    @property
    def has_arrived(self) -> bool | None:
        """None if the log-probs leave it open."""
        if self.share + DEVIATIONS * self.deviation < MISSING:
            return False
        return True if self.share - DEVIATIONS * self.deviation > ARRIVED else None

    def __str__(self) -> str:
        return f"{self.share:.2f} ± {self.deviation:.2f} of its effect, {self.per_token:.1e} a token"


@dataclass(kw_only=True, slots=True)
class AdapterCheck:
    """Decides when to compare, until one comparison is conclusive."""

    is_open: bool
    """True while the answer is unknown; from the start False without an adapter or with `tree.self_check=False`."""
    is_loaded: bool
    """True if the adapter is loaded, and not zero before the first update."""
    updates: int = 0
    """The actor's updates that began in this process."""
    _chances: int = 0

    @classmethod
    def of(cls, config: DictConfig) -> "AdapterCheck":
        """Read a run's config."""
        model = config.actor_rollout_ref.model
        is_on = as_tree_config(OmegaConf.select(config, f"{ENGINES[0]}.tree")).self_check
        samples = OmegaConf.select(config, "actor_rollout_ref.rollout.calculate_log_probs")
        is_open = bool(model.get("lora_rank", 0) and is_on and samples)
        return cls(is_open=is_open, is_loaded=model.get("lora_adapter_path", None) is not None)

    def begin_update(self, version: int) -> bool:
        """True if this update's rows are to be compared: the 1st, 2nd, 4th, 8th, ... that can be conclusive.

        `version` counts the updates that made the trainer's weights, also before a restart.
        """
        self.updates += 1
        if not self.is_open or not (version or self.is_loaded):
            return False
        self._chances += 1
        return self._chances & (self._chances - 1) == 0

    def is_comparable(self, tag: Mapping[str, Any], version: int) -> bool:
        """True if a row is from weights that are, or are much like, those of `version`."""
        oldest = tag.get("min_global_steps")
        return oldest is not None and UPDATES_PER_STALE_VERSION * (version - oldest) < max(1, self.updates)

    def judge(self, columns: Sequence[torch.Tensor], mask_BT: torch.Tensor) -> dict[str, float]:
        """Compare log-probs [B, T] of the rollout, and of the trainer with and without the adapter, at trained tokens.

        Prints once that the adapter has arrived; raises an AdapterMissingError if the rollout samples without it.
        """
        effect = Effect.of(*(column_BT[mask_BT.bool()] for column_BT in columns))
        if effect is None:
            return {}
        if effect.has_arrived is False:
            raise AdapterMissingError(
                f"the rollout samples without the LoRA adapter: its log-probs have {effect} (expected 1). Set "
                "actor_rollout_ref.model.lora.merge=True, which sends merged weights, or find out why the adapter does "
                f"not arrive; {ENGINES[0]}.tree.self_check=False trains anyway"
            )
        if effect.has_arrived:
            self.is_open = False
            print(f"adapter: the rollout samples with it; its log-probs have {effect}", flush=True)
        return {SHARE: effect.share}
