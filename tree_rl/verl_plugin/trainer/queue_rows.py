"""Reads and writes rows in verl's queue: token ids, reward components, columns for rows with and without padding."""

from typing import Any

import numpy as np
import torch
from omegaconf import DictConfig
from tensordict import TensorDict

from tree_rl.verl_plugin.compat import KVBatchMeta
from tree_rl.verl_plugin.compat import transfer_queue as tq


def real_rows(batch: KVBatchMeta) -> list[int]:
    """Rows of a batch that are not padding, in order."""
    return [row for row, tag in enumerate(batch.tags) if not tag.get("is_padding", False)]


def fetch_row_tokens(batch: KVBatchMeta) -> dict[str, np.ndarray]:
    """Token ids of every row, by key."""
    columns = tq.kv_batch_get(keys=batch.keys, partition_id=batch.partition_id, select_fields=["input_ids"])
    return {key: ids.numpy() for key, ids in zip(batch.keys, columns["input_ids"].unbind(), strict=True)}


def fetch_session_figures(batch: KVBatchMeta, final_rows: np.ndarray) -> list[dict[str, float]]:
    """What agents and gateway report of each session: the numbers among its `reward_extra_info`.

    Args:
        batch: real rows.
        final_rows: int [S], the row of each session that is read.
    """
    keys = [batch.keys[row] for row in final_rows]
    columns = tq.kv_batch_get(keys=keys, partition_id=batch.partition_id, select_fields=["extra_fields"])
    if "extra_fields" not in columns:
        return []
    reports = [extra.get("reward_extra_info") or {} for extra in columns.pop("extra_fields").tolist()]
    return [
        {name: float(value) for name, value in report.items() if isinstance(value, bool | int | float | np.number)}
        for report in reports
    ]


def reward_components(
    extra_fields: list[dict[str, Any]], algorithm: DictConfig, keys: list[str]
) -> dict[str, np.ndarray]:
    """Columns of the reward components that gdpo normalises one by one; a ValueError names a missing one."""
    columns: dict[str, np.ndarray] = {}
    for name in algorithm.get("gdpo_reward_keys", None) or ():
        for key, extra in zip(keys, extra_fields, strict=True):
            if name not in (extra.get("reward_extra_info") or {}):
                raise ValueError(
                    f"row {key}: algorithm.gdpo_reward_keys asks for {name!r}, but the reward function returned "
                    "no such component; return a dict that contains it"
                )
        columns[name] = np.array([extra["reward_extra_info"][name] for extra in extra_fields], dtype=object)
    return columns


def put_with_padding(batch: KVBatchMeta, real: list[int], columns: dict[str, torch.Tensor]) -> KVBatchMeta:
    """Write nested columns of the real rows, and a zero for the one response token of each padding row."""
    rank_of_row = {row: index for index, row in enumerate(real)}
    fields: dict[str, torch.Tensor] = {}
    for name, nested in columns.items():
        values = nested.unbind()
        filler = values[0].new_zeros(1)
        rows = [values[rank_of_row[row]] if row in rank_of_row else filler for row in range(len(batch))]
        fields[name] = torch.nested.as_nested_tensor(rows, layout=torch.jagged)
    return tq.kv_batch_put(
        keys=batch.keys, partition_id=batch.partition_id, fields=TensorDict(fields, batch_size=len(batch))
    )
