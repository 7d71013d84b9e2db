"""Batches of sessions before advantages, and the advantages of an estimator."""

from collections.abc import Sequence

import numpy as np
import torch
from omegaconf import OmegaConf
from verl.protocol import DataProto

from tree_rl.verl_plugin.trainer.advantages import Estimation, session_advantages
from tree_rl.verl_plugin.trainer.sessions import Sessions, trained_token_weights

WIDTH = 9
PROMPT = 3
COPIES = [3, 1, 2, 1, 1, 4]
"""Rows of each session of a batch in which some branch."""
TENSORS = ("response_mask", "token_level_scores", "values", "old_log_probs", "sum_pi_squared", "kl")


def make_batch(copies: Sequence[int], seed: int = 0) -> tuple[DataProto, list[str], list[np.ndarray], np.ndarray]:
    """Two prompts with three sessions each; session s appears as copies[s] identical rows."""
    generator = torch.Generator().manual_seed(seed)
    rows, keys, uids = [], [], []
    for session, times in enumerate(copies):
        length = int(torch.randint(3, WIDTH + 1, (), generator=generator))
        mask = (torch.rand(WIDTH, generator=generator) < 0.7).long()
        mask[0] = mask[length - 1] = 1
        mask[length:] = 0
        inside = torch.arange(WIDTH) < length
        reward = torch.zeros(WIDTH)
        reward[length - 1] = torch.randn((), generator=generator)
        row = {
            "response_mask": mask,
            "token_level_scores": reward,
            "values": torch.randn(WIDTH, generator=generator) * inside,
            "old_log_probs": -torch.rand(WIDTH, generator=generator) * inside,
            "sum_pi_squared": torch.rand(WIDTH, generator=generator) * inside,
            "kl": torch.rand(WIDTH, generator=generator) * mask,
            "correct": reward.sum(),
            "format": torch.randn((), generator=generator),
            "ids": torch.randint(1, 50, (PROMPT + length,), generator=generator),
            "length": length,
        }
        for branch in range(times):
            rows.append(row)
            uids.append(f"uid-{session // 3}")
            keys.append(f"uid-{session // 3}_{session % 3}_{branch}")
    tensors = {name: torch.stack([row[name] for row in rows]) for name in TENSORS}
    reported = {name: np.array([float(row[name]) for row in rows], dtype=object) for name in ("correct", "format")}
    data = DataProto.from_dict(tensors=tensors, non_tensors={"uid": np.array(uids, dtype=object), **reported})
    data.batch["token_level_rewards"] = data.batch["token_level_scores"]
    return data, keys, [row["ids"].numpy() for row in rows], np.array([row["length"] for row in rows])


def settings(name: str, **extra: object) -> Estimation:
    usual = {"gamma": 0.97, "lam": 0.9, "norm_adv_by_std_in_grpo": True}
    usual |= {"gdpo_reward_keys": ["correct", "format"], "gdpo_reward_weights": [1.0, 0.5]}
    return Estimation(estimator=name, algorithm=OmegaConf.create({**usual, **extra}), num_repeat=3)


def estimate(
    name: str, batch: tuple[DataProto, list[str], list[np.ndarray], np.ndarray], **extra: object
) -> tuple[torch.Tensor, torch.Tensor]:
    data, keys, ids, lengths = batch
    sessions = Sessions.from_keys(keys)

    def weights() -> torch.Tensor:
        return trained_token_weights(sessions, ids, data.batch["response_mask"], lengths)

    result = session_advantages(data, sessions, settings(name, **extra), weights)
    return result.batch["advantages"], result.batch["returns"]
