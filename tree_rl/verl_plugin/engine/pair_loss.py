"""Preference losses in the form of verl's losses: they couple the two rows of a pair."""

from dataclasses import dataclass
from typing import Any

import torch
from tensordict import TensorDict

from tree_rl.training.loss.outputs import LOG_PROBS
from tree_rl.training.loss.preference_loss import IPO, LOSS_TYPES, SIGMOID, preference_losses, sums_of_rows
from tree_rl.verl_plugin.compat import AggregationType, Metric

PLACE = "place_in_pairs"
"""Column of the batch, int64 [B]: 2p for the chosen row of its pair p, 2p + 1 for the rejected one."""
REFERENCE = "reference_log_probs"
"""Column of the batch, float64 [B]: the reference's log-prob of the row's trained tokens."""


@dataclass(frozen=True, kw_only=True, slots=True)
class PairLoss:
    """Mean preference loss over the pairs of a batch; `global_batch_size` counts pairs."""

    beta: float = 0.1
    """Strength of the reference: DPO's beta, IPO's tau."""
    loss_type: str = SIGMOID
    """`sigmoid` (DPO) or `ipo`."""
    label_smoothing: float = 0.0
    """Probability that a label is wrong; for `sigmoid` alone."""
    reference_free: bool = False
    """True compares with a uniform reference, which needs no pass."""

    def __post_init__(self) -> None:
        if self.loss_type not in LOSS_TYPES:
            raise ValueError(f"dpo.loss_type={self.loss_type}: expected one of {', '.join(LOSS_TYPES)}")
        if not 0 < self.beta < float("inf"):
            raise ValueError(f"dpo.beta={self.beta}: expected a finite number above 0")
        if not 0 <= self.label_smoothing < 0.5:
            raise ValueError(f"dpo.label_smoothing={self.label_smoothing}: expected a number from 0 to below 0.5")
        if self.label_smoothing and self.loss_type == IPO:
            raise ValueError("dpo.label_smoothing: ipo has none; set it to 0, or dpo.loss_type=sigmoid")

    def __call__(
        self, *, model_output: dict[str, torch.Tensor], data: TensorDict, dp_group: Any = None
    ) -> tuple[torch.Tensor, dict[str, Any]]:
        """Loss and metrics (with TRL's names) of some rows; raises a ValueError if they are not whole pairs."""
        place_P2 = _by_pair(data[PLACE])
        if (place_P2[:, 0] % 2 != 0).any() or (place_P2[:, 1] != place_P2[:, 0] + 1).any():
            raise ValueError("expected whole pairs in a micro-batch, received a row without the other one of its pair")
        log_prob_P2 = _by_pair(log_probs_of_rows(model_output[LOG_PROBS], data["loss_mask"]))
        ratio_P2 = log_prob_P2 if self.reference_free else log_prob_P2 - _by_pair(data[REFERENCE])
        compared_P2 = ratio_P2
        if self.loss_type == IPO:
            compared_P2 = ratio_P2 / _by_pair(sums_of_rows(data["loss_mask"].values(), data["loss_mask"].offsets()))
        losses_P = preference_losses(
            *compared_P2.unbind(1), beta=self.beta, loss_type=self.loss_type, label_smoothing=self.label_smoothing
        )
        # verl averages gradients and sums of metrics over the data-parallel ranks.
        share = data["dp_size"] / data["global_batch_size"]
        (chosen_P, rejected_P), log_probs_of = self.beta * ratio_P2.detach().T, log_prob_P2.detach().T
        means = {
            "rewards/chosen": chosen_P,
            "rewards/rejected": rejected_P,
            "rewards/accuracies": (chosen_P > rejected_P).double(),
            "rewards/margins": chosen_P - rejected_P,
            "logps/chosen": log_probs_of[0],
            "logps/rejected": log_probs_of[1],
        }
        metrics = {name: Metric(AggregationType.SUM, value_P.sum() * share) for name, value_P in means.items()}
        return losses_P.sum() * share, metrics


def log_probs_of_rows(log_probs: Any, loss_mask: Any) -> torch.Tensor:
    """Log-prob of each row's trained tokens, float64 [B].

    Args:
        log_probs: nested [B, L], of the next token.
        loss_mask: nested [B, L], at the token itself.
    """
    trained_F = torch.roll(loss_mask.values(), shifts=-1, dims=0)
    return sums_of_rows(log_probs.values() * trained_F, log_probs.offsets())


def _by_pair(rows_B: torch.Tensor) -> torch.Tensor:
    """[P, 2]: a group's rows stay in order, so that the rows of a pair are neighbours."""
    if len(rows_B) % 2:
        raise ValueError(f"expected whole pairs in a micro-batch, received {len(rows_B)} rows")
    return rows_B.reshape(-1, 2)
