"""A benchmark batch as verl's workers receive it, and what the trainer adds between its two calls of a worker."""

from typing import Any

import numpy as np
import torch
from tensordict import TensorDict

from tree_rl.benchmark.batch import Batch
from tree_rl.verl_plugin.compat import tensordict_utils as tu


def rows_as_received(batch: Batch, *, max_tokens: int) -> TensorDict:
    """The rows for `compute_log_prob`: jagged columns and the trainer's flags; micro-batches of `max_tokens` tokens."""
    ids = [torch.from_numpy(row.astype(np.int64)) for row in batch.rows]
    prompts = [_prompt_length(trained) for trained in batch.trained]
    parts = list(zip(ids, batch.trained, prompts, strict=True))
    mask = _nested([torch.from_numpy(trained[prompt:].astype(np.int64)) for _, trained, prompt in parts])
    columns = {
        "input_ids": _nested(ids),
        "position_ids": _nested([torch.arange(len(row)) for row in ids]),
        "prompts": _nested([row[:prompt] for row, _, prompt in parts]),
        "responses": _nested([row[prompt:] for row, _, prompt in parts]),
        "response_mask": mask,
        "loss_mask": mask.clone(),
        "uid": list(batch.groups),
    }
    flags = {
        "use_remove_padding": True,
        "use_dynamic_bsz": True,
        "max_token_len_per_gpu": max_tokens,
        "use_fused_kernels": False,
        "temperature": 1.0,
        "calculate_entropy": True,
    }
    data: TensorDict = tu.get_tensordict(columns, non_tensor_dict=flags)
    return data


def rows_to_update(data: TensorDict, batch: Batch, log_probs: Any) -> TensorDict:
    """The rows for `update_actor`: with old log-probs, those of a reference (the same) and advantages.

    `log_probs` are the engine's, jagged [B, L], position i of token i + 1.
    """
    update = data.copy()
    lengths = [len(response) for response in data["responses"].unbind()]
    rows = zip(log_probs.unbind(), lengths, strict=True)
    old = _nested([row[-1 - length : -1].float().cpu() for row, length in rows])
    update["old_log_probs"], update["ref_log_prob"] = old, old.clone()
    advantages = zip(lengths, batch.advantage_B, strict=True)
    update["advantages"] = _nested([torch.full((length,), float(value)) for length, value in advantages])
    tu.assign_non_tensor(update, calculate_entropy=False, global_batch_size=len(lengths))
    return update


def _prompt_length(trained: np.ndarray) -> int:
    """Tokens before the first trained one; a row without any keeps one token as its response."""
    return max(int(trained.argmax()) if trained.any() else len(trained) - 1, 1)


def _nested(tensors: list[torch.Tensor]) -> torch.Tensor:
    return torch.nested.as_nested_tensor(tensors, layout=torch.jagged)
