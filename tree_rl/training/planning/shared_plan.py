"""Digest of a plan: ranks that share tokens need equal plans, or they would mix tokens of different rows."""

from collections.abc import Sequence
from hashlib import blake2b

import torch

from tree_rl.models.sequence_parallel import SequenceParallel
from tree_rl.training.micro_batch import MicroBatch
from tree_rl.training.ranks.lock_step import SharedPlan
from tree_rl.training.rows import Rows


def shared_plan(ranks: SequenceParallel | None, rows: Rows, batches: Sequence[MicroBatch]) -> SharedPlan | None:
    """Digest of this rank's rows and micro-batches; None without sequence parallelism."""
    if ranks is None:
        return None
    digest = blake2b(digest_size=16)
    for array in (rows.token_ids_F, rows.offsets, rows.wanted_F):
        digest.update(array.tobytes())
    for batch in batches:
        digest.update(repr((batch.rows, batch.saving)).encode())
        if batch.plan is not None:
            digest.update(batch.plan.partition_of_token.tobytes())
    return SharedPlan(ranks=tuple(torch.distributed.get_process_group_ranks(ranks.group)), digest=digest.digest())
