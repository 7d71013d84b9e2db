"""Finds the rows of a conversation by their shared prefix, and puts them into one batch, so that they form a tree."""

from collections.abc import Iterator, Sequence

import numpy as np
from torch.utils.data import Sampler

from tree_rl.tree import Forest

CONVERSATION = "conversation"
"""Key of the name of a row's conversation."""
SHARED_PART = 0.5
"""Share of the shorter row from which two rows belong to one conversation; system prompts are shorter."""


def conversations_of_rows(row_tokens: Sequence[np.ndarray]) -> np.ndarray:
    """Number the conversations of B rows of token ids: int64 [B], equal for rows of one conversation.

    Neighbours in token order that share at least `SHARED_PART` of the shorter one belong to one conversation.
    """
    order = Forest.from_rows(row_tokens).row_order
    shorter = np.minimum(order.lengths[1:], order.lengths[:-1])
    starts_new = order.shared[1:] < SHARED_PART * shorter
    conversation = np.zeros(len(order.rows), dtype=np.int64)
    conversation[order.rows[1:]] = np.cumsum(starts_new)
    return conversation


def groups_of_prompts(prompts: Sequence[np.ndarray]) -> np.ndarray:
    """Number the groups of B prompts of token ids: int64 [B], equal for prompts that begin with the same prompt."""
    order = Forest.from_rows(prompts).row_order
    group_of_prompt = np.zeros(len(prompts), dtype=np.int64)
    # A prompt is behind the one it begins with, but others that begin with it may be between them.
    group, first_length, shared_with_first = -1, 1, 0
    for prompt, shared, length in zip(order.rows, order.shared, order.lengths, strict=True):
        shared_with_first = min(shared_with_first, shared)
        if shared_with_first < first_length:
            group, first_length, shared_with_first = group + 1, length, length
        group_of_prompt[prompt] = group
    return group_of_prompt


class ConversationSampler(Sampler[int]):
    """Shuffles conversations instead of rows; every rank takes consecutive runs of `batch_rows` rows.

    Only the end of a batch splits a conversation. Rows that do not fill the last global batch do not train, as with
    verl's sampler and `drop_last`.
    """

    def __init__(
        self, group_of_row: np.ndarray, *, batch_rows: int, num_replicas: int, rank: int, shuffle: bool, seed: int = 0
    ) -> None:
        """Prepare the share of one of `num_replicas` data-parallel ranks, from the conversation of each row, int [B].

        `shuffle` visits the conversations in a new order in every epoch, by a `seed` that all ranks share.
        """
        _, number = np.unique(np.asarray(group_of_row), return_inverse=True)
        by_group = np.argsort(number, kind="stable")
        self._groups = np.split(by_group, np.cumsum(np.bincount(number))[:-1])
        self._batch_rows, self._num_replicas, self._rank = batch_rows, num_replicas, rank
        self._num_batches = len(by_group) // (batch_rows * num_replicas)
        self._shuffle, self._seed, self._epoch = shuffle, seed, 0

    def __len__(self) -> int:
        return self._num_batches * self._batch_rows

    def __iter__(self) -> Iterator[int]:
        order = np.arange(len(self._groups))
        if self._shuffle:
            np.random.default_rng((self._seed, self._epoch)).shuffle(order)
        rows = np.concatenate([self._groups[group] for group in order])
        shape = (self._num_batches, self._num_replicas, self._batch_rows)
        return iter(rows[: np.prod(shape)].reshape(shape)[:, self._rank].ravel().tolist())

    def set_epoch(self, epoch: int) -> None:
        self._epoch = epoch
