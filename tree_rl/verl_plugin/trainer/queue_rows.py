"""Reads and writes rows in verl's queue: token ids, figures, call weights, reward components, padded columns."""

from collections import Counter
from collections.abc import Mapping
from typing import Any

import numpy as np
import torch
from omegaconf import DictConfig
from tensordict import TensorDict
from verl.protocol import DataProto

from tree_rl.rollout.gateway.calls.agent_names import MAIN
from tree_rl.verl_plugin.agent_loops.image_spans import IMAGE_SPANS, with_image_keys
from tree_rl.verl_plugin.compat import KVBatchMeta, response_from_nested
from tree_rl.verl_plugin.compat import transfer_queue as tq
from tree_rl.verl_plugin.extra_fields import CALL_WEIGHTS

ENGINE_OBJECTS = ("uid", "session_id", "index", "multi_modal_inputs")
"""Columns that engines read besides tensors: names of a row, and its images."""
UNREAD_BY_UPDATES = ("dummy_tensor", "rm_scores", "rollout_log_probs")
"""Tensors of every row that only the trainer reads."""
UNREAD_BY_PASSES = (*UNREAD_BY_UPDATES, "prompts", "responses")
"""Those, and what losses need to cut responses."""
MANY_AGENTS = 16
"""Most sub-agents of a batch that get a metric each."""


def real_rows(batch: KVBatchMeta) -> list[int]:
    """Rows of a batch that are not padding, in order."""
    return [row for row, tag in enumerate(batch.tags) if not tag.get("is_padding", False)]


def fetch_row_tokens(batch: KVBatchMeta) -> dict[str, np.ndarray]:
    """Token ids of every row, by key; the tokens of an image have a number of its content instead."""
    columns = tq.kv_batch_get(keys=batch.keys, partition_id=batch.partition_id, select_fields=["input_ids"])
    rows = zip(batch.keys, columns["input_ids"].unbind(), batch.tags, strict=True)
    return {key: with_image_keys(ids.numpy(), tag.get(IMAGE_SPANS, ())) for key, ids, tag in rows}


def with_engine_fields(batch: KVBatchMeta, *, trains: bool = False) -> KVBatchMeta:
    """The batch; workers fetch only the columns that engines read: tensors and `ENGINE_OBJECTS`.

    verl's queue wraps every other value of every row in an object of its own, which takes as long as a small update,
    and a column of tensors takes a tenth of a second for 1,700 rows.
    """
    first = tq.kv_batch_get(keys=batch.keys[:1], partition_id=batch.partition_id)
    read = (name for name, value in first.items() if isinstance(value, torch.Tensor) or name in ENGINE_OBJECTS)
    unread = UNREAD_BY_UPDATES if trains else UNREAD_BY_PASSES
    batch.fields = [name for name in read if name not in unread]
    return batch


def log_prob_request(batch: KVBatchMeta, temperature: float) -> KVBatchMeta:
    """A copy of the batch that asks a pass for log-probs alone; its flags do not reach the batch."""
    return with_engine_fields(
        KVBatchMeta(
            keys=batch.keys,
            tags=batch.tags,
            partition_id=batch.partition_id,
            extra_info={"compute_loss": False, "calculate_entropy": False, "temperature": temperature},
        )
    )


def fetch_session_figures(batch: KVBatchMeta, final_rows: np.ndarray) -> list[dict[str, float]]:
    """Figures of each session, from its final row: the numbers in its `reward_extra_info`, and the number of each
    sub-agent's calls if a batch has at most `MANY_AGENTS`."""
    keys = [batch.keys[row] for row in final_rows]
    columns = tq.kv_batch_get(keys=keys, partition_id=batch.partition_id, select_fields=["extra_fields"])
    if "extra_fields" not in columns:
        return []
    extras = columns.pop("extra_fields").tolist()
    reports = [extra.get("reward_extra_info") or {} for extra in extras]
    figures = [
        {name: float(value) for name, value in report.items() if isinstance(value, bool | int | float | np.number)}
        for report in reports
    ]
    callers = [Counter(extra.get("call_agents") or ()) for extra in extras]
    names = {name for caller in callers for name in caller} - {MAIN}
    # Some harnesses give every sub-agent a new name.
    named = names if len(names) <= MANY_AGENTS else set()
    return [
        {**own, **{f"calls_of_{name}": float(count) for name, count in caller.items() if name in named}}
        for own, caller in zip(figures, callers, strict=True)
    ]


def fetch_call_weights(keys: list[str], partition_id: str, response_mask_BT: torch.Tensor) -> torch.Tensor:
    """Weight of each response token (`side_calls`), float32 [B, T]; 1.0 for rows without weights."""
    columns = tq.kv_batch_get(keys=keys, partition_id=partition_id, select_fields=["extra_fields"])
    weights_BT = torch.ones(response_mask_BT.shape, device=response_mask_BT.device)
    for row, extra in enumerate(columns.pop("extra_fields").tolist()):
        weights = extra.get(CALL_WEIGHTS)
        if weights is not None:
            weights_BT[row, : len(weights)] = torch.tensor(weights)
    return weights_BT


def fetch_log_probs(
    keys: list[str], partition_id: str, adapted: Mapping[str, torch.Tensor] | None
) -> tuple[list[torch.Tensor], torch.Tensor]:
    """Log-probs [B, T] of the rollout and of the trainer with and without adapter, and the mask of trained tokens.

    Where the queue has no old log-probs or the rollout's (verl's `bypass_mode`), `adapted` has those with the adapter,
    by key.
    """
    names = ["rollout_log_probs", "old_log_probs", "ref_log_prob"]
    fields = [name for name in (*names, "response_mask") if adapted is None or name != "old_log_probs"]
    columns = tq.kv_batch_get(keys=keys, partition_id=partition_id, select_fields=fields)
    if adapted is not None:
        columns["old_log_probs"] = torch.nested.as_nested_tensor([adapted[key] for key in keys], layout=torch.jagged)
    padded = columns.to_padded_tensor()
    return [padded[name] for name in names], padded["response_mask"]


def fetch_trained_log_probs(keys: list[str], partition_id: str) -> tuple[DataProto, int]:
    """Figures [B, T] of the trained tokens of each row, which stand at its front, and tokens of the longest response.

    Columns: `old_log_probs` and `entropy` from a pass, `rollout_log_probs` if the rollout reports them, and
    `response_mask`; also `responses`, of which verl reads the shape alone.
    """
    fields = ["log_probs", "entropy", "response_mask", "rollout_log_probs"]
    columns = tq.kv_batch_get(keys=keys, partition_id=partition_id, select_fields=fields)
    mask = columns.pop("response_mask")
    for name, given in (("old_log_probs", "log_probs"), ("entropy", "entropy")):
        columns[name] = response_from_nested(columns.pop(given), mask)
    is_trained = mask.values() != 0
    counted = torch.cat([torch.zeros(1, dtype=torch.int64), is_trained.cumsum(0)])
    trained_B = counted[mask.offsets()].diff()
    front_BT = torch.arange(int(trained_B.max())) < trained_B[:, None]
    padded = {"response_mask": front_BT.to(mask.dtype), "responses": front_BT}
    for name, column in columns.items():
        padded[name] = torch.zeros(front_BT.shape, dtype=column.dtype)
        padded[name][front_BT] = column.values()[is_trained]
    return DataProto.from_dict(tensors=padded), int(mask.offsets().diff().max())


def log_probs_of_pass(workers: Any, batch: KVBatchMeta, temperature: float) -> dict[str, torch.Tensor]:
    """Log-probs of every row's response, by key, from a pass of the actor's `workers`."""
    workers.compute_log_prob(log_prob_request(batch, temperature))
    return fetch_response_log_probs(batch)


def fetch_response_log_probs(batch: KVBatchMeta) -> dict[str, torch.Tensor]:
    """Log-probs of every row's response, by key, as the actor's workers wrote them last."""
    fields = ["log_probs", "response_mask"]
    columns = tq.kv_batch_get(keys=batch.keys, partition_id=batch.partition_id, select_fields=fields)
    found = response_from_nested(columns["log_probs"], columns["response_mask"])
    return dict(zip(batch.keys, found.unbind(), strict=True))


def reward_components(
    extra_fields: list[dict[str, Any]], algorithm: DictConfig, keys: list[str]
) -> dict[str, np.ndarray]:
    """Columns of the reward components that gdpo normalises; raises a ValueError that names a missing one."""
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
    """Write nested columns of the real rows, with a zero for the single response token of each padding row."""
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
