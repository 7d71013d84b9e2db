"""The key-value cache of the embedded rollout engine: one row ("slot") for each sequence.

Finished sequences stay in their slots, so that later prompts can reuse a prefix.
Shapes: R rows of a forward, Q new tokens per row, G key-value heads, D head size, T tokens of a slot.
"""

from typing import Any

import numpy as np
import torch
from transformers import PretrainedConfig
from transformers.cache_utils import Cache

from tree_rl.cost.cost_model import ModelShape


class SlotCache(Cache):
    """A `transformers` cache of `num_slots` slots for T = `capacity_tokens` each; a forward uses a range of slots.

    Column T of every slot receives padding; nothing reads it.
    """

    def __init__(self, *, num_slots: int, capacity_tokens: int) -> None:
        super().__init__(layers=[])
        self.num_slots = num_slots
        self.capacity_tokens = capacity_tokens
        self.tokens_ST = np.zeros((num_slots, capacity_tokens), dtype=np.int64)
        self.length_S = np.zeros(num_slots, dtype=np.int64)
        self.last_used_S = np.zeros(num_slots, dtype=np.int64)
        self._keys: dict[int, torch.Tensor] = {}
        self._values: dict[int, torch.Tensor] = {}
        self._rows: slice = slice(0, 0)
        self._row_index: torch.Tensor | None = None
        self._column_RQ: torch.Tensor | None = None
        self._context_tokens = 0

    def begin(self, rows: slice, column_RQ: torch.Tensor, context_tokens: int) -> None:
        """Prepare a forward of R slots: the column of each new token, int64, and the number that attention reads."""
        self._rows = rows
        self._row_index = torch.arange(rows.start, rows.stop, device=column_RQ.device).unsqueeze(1)
        self._column_RQ = column_RQ
        self._context_tokens = context_tokens

    def update(
        self, key_states: torch.Tensor, value_states: torch.Tensor, layer_idx: int, *_args: Any, **_kwargs: Any
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Store a layer's new keys and values [R, G, Q, D]; return views of all, [R, G, context_tokens, D]."""
        return self._written(self._keys, layer_idx, key_states), self._written(self._values, layer_idx, value_states)

    def _written(self, store: dict[int, torch.Tensor], layer: int, new_RGQD: torch.Tensor) -> torch.Tensor:
        if layer not in store:
            _, heads, _, head_size = new_RGQD.shape
            # calloc leaves untouched pages unmapped, so an idle slot costs no memory on the CPU.
            store[layer] = new_RGQD.new_zeros(self.num_slots, heads, self.capacity_tokens + 1, head_size)
        kept = store[layer]
        kept[self._row_index, :, self._column_RQ] = new_RGQD.transpose(1, 2)
        return kept[self._rows, :, : self._context_tokens]

    def get_seq_length(self, layer_idx: int = 0) -> int:
        """Return 0, because we always pass positions and masks explicitly."""
        return 0

    def longest_prefix(self, prompt_ids: np.ndarray) -> tuple[int, int]:
        """The slot with the longest prefix of a prompt, int64 [P], and its length: at most P - 1, as one must run."""
        width = min(len(prompt_ids) - 1, int(self.length_S.max(initial=0)))
        if width <= 0:
            return 0, 0
        equal = self.tokens_ST[:, :width] == prompt_ids[:width]
        shared_S = np.where(equal.all(axis=1), width, equal.argmin(axis=1))
        shared_S = np.minimum(shared_S, self.length_S)
        slot = int(shared_S.argmax())
        return slot, int(shared_S[slot])

    def swap(self, a: int, b: int) -> None:
        if a == b:
            return
        length = int(max(self.length_S[a], self.length_S[b]))
        for kept in self._allocated():
            kept[[a, b], :, :length] = kept[[b, a], :, :length]
        self.tokens_ST[[a, b], :length] = self.tokens_ST[[b, a], :length]
        self.length_S[[a, b]] = self.length_S[[b, a]]
        self.last_used_S[[a, b]] = self.last_used_S[[b, a]]

    def copy_prefix(self, source: int, target: int, length: int) -> None:
        """Replace the content of `target` by the first `length` tokens of `source`."""
        if source != target:
            for kept in self._allocated():
                kept[target, :, :length] = kept[source, :, :length]
            self.tokens_ST[target, :length] = self.tokens_ST[source, :length]
        self.length_S[target] = length

    def _allocated(self) -> list[torch.Tensor]:
        return [*self._keys.values(), *self._values.values()]

    def append_token_ids(self, slot: int, token_ids: np.ndarray) -> None:
        """Record the tokens whose keys and values a forward has appended to a slot."""
        start = int(self.length_S[slot])
        self.tokens_ST[slot, start : start + len(token_ids)] = token_ids
        self.length_S[slot] = start + len(token_ids)

    def forget(self, first_slot: int = 0) -> None:
        """Empty all slots from `first_slot` on."""
        self.length_S[first_slot:] = 0

    def release(self) -> None:
        """Empty all slots and free their memory; the next forward allocates it again."""
        self.forget()
        self._keys.clear()
        self._values.clear()


def num_slots_within(budget_bytes: int, config: PretrainedConfig, *, capacity_tokens: int, dtype: torch.dtype) -> int:
    """Number of slots of `capacity_tokens` that fit into `budget_bytes`; raises a ValueError if none fits."""
    shape = ModelShape.from_config(config.to_dict())
    bytes_per_token = config.num_hidden_layers * shape.key_value_width * dtype.itemsize
    slots = budget_bytes // (bytes_per_token * (capacity_tokens + 1))
    if slots < 1:
        raise ValueError(
            f"rollout.engine_kwargs.hf.kv_cache_bytes={budget_bytes} holds less than one sequence of {capacity_tokens} "
            f"tokens ({bytes_per_token * (capacity_tokens + 1)} bytes); raise it or lower rollout.max_model_len"
        )
    return int(slots)
