"""Advantages for sessions with several rows: one outcome per session, for every estimator of verl.

With one row per session the result equals verl's bit for bit. Splitting a session into k identical branches changes no
advantage. Legend: B rows, S sessions, T padded response length, W width of a session's pseudo row.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from verl.protocol import DataProto

from tree_rl.verl_plugin.compat import compute_advantage, get_adv_estimator_fn, masked_whiten
from tree_rl.verl_plugin.trainer.sessions import Sessions

OUTCOME = ("grpo", "grpo_vectorized", "grpo_passk", "rloo", "rloo_vectorized", "gpg")
"""Estimators with one scalar per session, computed from the outcomes of its group."""
LENGTH_AWARE = ("opo", "reinforce_plus_plus_baseline", "gdpo")
"""Estimators with one scalar per session, computed from outcomes and the number of the session's trained tokens."""
WHITENED = ("gae", "reinforce_plus_plus")
"""Estimators with one value per row token, normalised over the batch's tokens."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Estimation:
    """Arguments of verl's `compute_advantage` besides the data."""

    estimator: str
    """Name of the estimator in ADV_ESTIMATOR_REGISTRY."""
    algorithm: Any
    num_repeat: int
    """Number of sessions per prompt (rollout.n)."""

    def stock(self, data: DataProto) -> DataProto:
        """verl's advantages of the given rows, each as an independent sample."""
        return compute_advantage(
            data,
            adv_estimator=self.estimator,
            gamma=self.algorithm.gamma,
            lam=self.algorithm.lam,
            num_repeat=self.num_repeat,
            norm_adv_by_std_in_grpo=self.algorithm.get("norm_adv_by_std_in_grpo", True),
            config=self.algorithm,
        )


def session_advantages(
    data: DataProto, sessions: Sessions, estimation: Estimation, token_weights: Callable[[], torch.Tensor]
) -> DataProto:
    """Write `advantages` and `returns`, both [B, T], counting every session once.

    * `OUTCOME`: the estimator sees one sample per session, with the outcome of the final row; its scalar applies to all
      trained tokens of all rows of the session.
    * `LENGTH_AWARE`: the same; a session's length is its number of unique trained tokens.
    * `WHITENED`: computed along each row; in the whitening a unique trained token has weight one, divided equally among
      the rows that train it.
    * Others: one row per session at a time, with the final rows of sessions that have fewer rows, so that no baseline
      contains two rows of a session.

    A KL penalty in the reward counts in a session's score once per unique trained token.

    Args:
        data: rows without padding rows: token_level_scores, token_level_rewards, response_mask [B, T], uid, and the
            columns of the estimator.
        token_weights: returns `trained_token_weights`, float32 [B, T]; called only if needed.
    """
    if estimation.estimator == "gdpo":
        _prepare_gdpo(data)
    if not sessions.branched:
        return estimation.stock(data)
    if estimation.estimator in OUTCOME + LENGTH_AWARE:
        advantages, returns = _outcome(data, sessions, estimation, token_weights)
    elif estimation.estimator in WHITENED:
        advantages, returns = _whitened(data, estimation, token_weights())
    else:
        advantages, returns = _branch_by_branch(data, sessions, estimation)
    data.batch["advantages"], data.batch["returns"] = advantages, returns
    return data


def _outcome(
    data: DataProto, sessions: Sessions, estimation: Estimation, token_weights: Callable[[], torch.Tensor]
) -> tuple[torch.Tensor, torch.Tensor]:
    """Run the estimator on one pseudo row per session, and give its scalar to all rows of the session."""
    mask_BT = data.batch["response_mask"]
    needs_lengths = estimation.estimator in LENGTH_AWARE
    has_penalty = bool(estimation.algorithm.get("use_kl_in_reward", False))
    weights_BT = token_weights() if needs_lengths or has_penalty else None
    score_S = session_scores(data, sessions, weights_BT if has_penalty else None)
    if needs_lengths and weights_BT is not None:
        length_S = _sum_by_session(weights_BT.sum(dim=-1), sessions).round().long()
        mask_SW = (torch.arange(max(int(length_S.max()), 1)) < length_S[:, None]).to(mask_BT.dtype)
    else:
        mask_SW = torch.ones(len(sessions), 1, dtype=mask_BT.dtype)
    rewards_SW = torch.zeros(mask_SW.shape, dtype=score_S.dtype)
    rewards_SW[:, 0] = score_S
    final = sessions.final_rows
    pseudo = DataProto.from_dict(
        tensors={
            "token_level_rewards": rewards_SW,
            "response_mask": mask_SW,
            "prompts": torch.zeros(len(sessions), 0, dtype=torch.int64),
            "attention_mask": torch.ones(mask_SW.shape, dtype=torch.int64),
        },
        non_tensors={name: column[final] for name, column in data.non_tensor_batch.items()},
    )
    scalar_S = estimation.stock(pseudo).batch["advantages"][:, 0]
    advantages_BT = scalar_S[sessions.session_of_row].unsqueeze(-1) * mask_BT
    return advantages_BT, advantages_BT


def session_scores(data: DataProto, sessions: Sessions, weights_BT: torch.Tensor | None) -> torch.Tensor:
    """float32 [S]: the final row's outcome plus, with weights, the penalties of the session's unique trained tokens."""
    scores_BT = data.batch["token_level_scores"]
    if weights_BT is None:
        return data.batch["token_level_rewards"][sessions.final_rows].sum(dim=-1)
    penalty_B = ((data.batch["token_level_rewards"] - scores_BT) * weights_BT).sum(dim=-1)
    return scores_BT[sessions.final_rows].sum(dim=-1) + _sum_by_session(penalty_B, sessions)


def _sum_by_session(values_B: torch.Tensor, sessions: Sessions) -> torch.Tensor:
    total_S = torch.zeros(len(sessions), dtype=values_B.dtype)
    return total_S.index_add_(0, torch.from_numpy(sessions.session_of_row), values_B)


def _whitened(data: DataProto, estimation: Estimation, weights_BT: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Values of each row from verl's recursion, whitened so that every unique trained token counts once."""
    batch = data.batch
    rewards_BT, mask_BT = batch["token_level_rewards"], batch["response_mask"]
    estimator = get_adv_estimator_fn(estimation.estimator)
    if estimation.estimator == "gae":
        # In float64, subtracting the values again does not lose precision.
        values_BT = batch["values"].double()
        _, returns_BT = estimator(
            token_level_rewards=rewards_BT.double(),
            values=values_BT,
            response_mask=mask_BT,
            gamma=estimation.algorithm.gamma,
            lam=estimation.algorithm.lam,
        )
        advantages_BT = masked_whiten(returns_BT - values_BT, weights_BT.double())
    else:
        _, returns_BT = estimator(token_level_rewards=rewards_BT, response_mask=mask_BT, config=estimation.algorithm)
        advantages_BT = masked_whiten(returns_BT, weights_BT) * mask_BT
    return advantages_BT.to(rewards_BT), returns_BT.to(rewards_BT)


def _branch_by_branch(data: DataProto, sessions: Sessions, estimation: Estimation) -> tuple[torch.Tensor, torch.Tensor]:
    """Run the estimator once per branch index on one row per session."""
    shape = data.batch["token_level_rewards"].shape
    advantages_BT, returns_BT = torch.zeros(shape), torch.zeros(shape)
    for branch in range(max(map(len, sessions.rows_of_session), default=0)):
        # A session with fewer rows takes part with its final one.
        rows = np.array([own[min(branch, len(own) - 1)] for own in sessions.rows_of_session], dtype=np.int64)
        estimated = estimation.stock(data.select_idxs(rows)).batch
        mine = np.array([branch < len(members) for members in sessions.rows_of_session])
        advantages_BT[rows[mine]] = estimated["advantages"][mine].to(advantages_BT)
        returns_BT[rows[mine]] = estimated["returns"][mine].to(returns_BT)
    return advantages_BT, returns_BT


def _prepare_gdpo(data: DataProto) -> None:
    """Add the columns by which verl's gdpo finds a response's last token, which the V1 trainer does not fetch."""
    if "attention_mask" not in data.batch:
        shape = data.batch["response_mask"].shape
        data.batch["prompts"] = torch.zeros(shape[0], 0, dtype=torch.int64)
        data.batch["attention_mask"] = torch.ones(shape, dtype=torch.int64)
