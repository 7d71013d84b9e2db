"""The number of rows of an optimizer step on all ranks, by which losses that average over sequences divide.

verl assumes `ppo_mini_batch_size * rollout.n` rows, one per session. Here a session has a row per branch, and the last
mini-batch may have fewer prompts than the others. Legend: B rows.
"""

from typing import Any

import torch
from tensordict import TensorDict

from tree_rl.verl_plugin.compat import get_device_id
from tree_rl.verl_plugin.compat import tensordict_utils as tu
from tree_rl.verl_plugin.engine.rows_in import PATH_WEIGHT_SCALE
from tree_rl.verl_plugin.options import PATH_WEIGHT_COLUMNS

PADDING_UID = "pad"
"""Prefix of verl's uid of padding rows; prompts have UUIDs."""


def assign_rows_of_step(data: TensorDict, *, path_weighting: str, group: torch.distributed.ProcessGroup | None) -> None:
    """Set the number of rows of the mini-batch for verl's losses, and the factor of path weights for the engine.

    Padding rows do not count; rows without a trained token do, as in stock verl. The factor makes the path weights of
    all rows sum to the number of rows, so that an average over sequences is the weighted average. Collective: changes
    the share of a mini-batch on each rank of `group`, verl's data-parallel group.
    """
    is_real_B = _is_real(data)
    weight_B = _weights(data, PATH_WEIGHT_COLUMNS.get(path_weighting)) * is_real_B
    sums = torch.stack([is_real_B.sum(), weight_B.sum()]).to(get_device_id())
    torch.distributed.all_reduce(sums, group=group)
    rows, weight = sums.tolist()
    tu.assign_non_tensor(data, global_batch_size=max(int(rows), 1))
    if weight > 0:
        tu.assign_non_tensor(data, **{PATH_WEIGHT_SCALE: rows / weight})


def _is_real(data: TensorDict) -> torch.Tensor:
    """float32 [B], 0 for padding rows, which have verl's uid and no trained token."""
    if "uid" not in data:
        return torch.ones(len(data))
    trains = [bool(mask.any()) for mask in data["loss_mask"].unbind()]
    named = [str(uid).startswith(PADDING_UID) for uid in data["uid"]]
    return torch.tensor([float(one or not other) for one, other in zip(trains, named, strict=True)])


def _weights(data: TensorDict, column: str | None) -> torch.Tensor:
    """Weight of each row, float32 [B]: the mean weight of its trained tokens; 1 without a column of weights."""
    if column is None or column not in data:
        return torch.ones(len(data))
    pairs: Any = zip(data[column].unbind(), data["response_mask"].unbind(), strict=True)
    return torch.tensor([_mean_weight(weight, mask != 0) for weight, mask in pairs])


def _mean_weight(weight_T: torch.Tensor, trained_T: torch.Tensor) -> float:
    trained = weight_T[trained_T]
    return float(trained.mean()) if len(trained) else float(weight_T.max())
