"""All ranks run one sequence of forwards and backwards, so that FSDP's collectives come in the same order everywhere.

Ranks agree beforehand. Each keeps the order of its own ops; where it has no op of the agreed kind, it runs a one-token
dummy.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch.distributed

FORWARD, BACKWARD = "F", "B"


@dataclass(frozen=True, kw_only=True, slots=True)
class Agreement:
    """What the ranks settle before anyone computes."""

    schedule: str
    """Ops that all ranks follow."""
    is_refused: bool
    """True if any rank refused its rows."""
    may_repeat: bool
    """True if every rank could run the call again from the start."""
    told: tuple[Any, ...] = ()
    """What each rank told the others beside, in their order."""


@dataclass(frozen=True, kw_only=True, slots=True)
class SharedPlan:
    """What the ranks that share tokens must all have planned alike."""

    ranks: tuple[int, ...]
    """That share them."""
    digest: bytes
    """Digest of their rows and how these run."""


def agree_on_ops(
    ops: str,
    *,
    is_refused: bool,
    may_repeat: bool,
    num_ranks: int,
    group: torch.distributed.ProcessGroup | None,
    shared: SharedPlan | None = None,
    told: Any = None,
) -> Agreement:
    """Settle a call with the other ranks.

    Args:
        ops: this rank's own ops, "F" and "B".
        is_refused: this rank refused its rows.
        may_repeat: this rank would lose nothing by running the call again.
        num_ranks: of the group.
        group: the ranks that run in lock-step.
        shared: with sequence parallelism.
        told: anything that this rank tells the others beside; it is pickled.

    Raises:
        RuntimeError: ranks that share tokens have planned differently; all ranks raise it.
    """
    gathered: list[Any] = [None] * num_ranks
    torch.distributed.all_gather_object(gathered, (ops, is_refused, may_repeat, shared, told), group=group)
    ops_of_rank, refused, repeatable, plans, told_by = zip(*gathered, strict=True)
    if not any(refused):
        _check_shared(plans)
    return Agreement(
        schedule="" if any(refused) else merge_ops(list(ops_of_rank)),
        is_refused=any(refused),
        told=told_by,
        may_repeat=all(repeatable),
    )


def _check_shared(plans: Sequence[SharedPlan | None]) -> None:
    digests: dict[tuple[int, ...], set[bytes]] = {}
    for plan in plans:
        if plan is not None:
            digests.setdefault(plan.ranks, set()).add(plan.digest)
    unlike = [list(ranks) for ranks, found in digests.items() if len(found) > 1]
    if unlike:
        raise RuntimeError(
            f"ranks {unlike[0]} share the tokens of their rows, but their rows or plans differ; hand equal rows to all "
            "ranks of a sequence-parallel group"
        )


def merge_ops(ops_of_rank: Sequence[str]) -> str:
    """A sequence of ops that contains every rank's ops in order.

    A forward goes first wherever any rank wants one, so that a rank without a backward always has a dummy forward to
    answer with; the sequence therefore never asks a rank for more backwards than it has run forwards.

    Args:
        ops_of_rank: one string of "F" and "B" per rank; every "B" has its "F" before it.

    Returns:
        The common sequence. Deterministic, and each rank's own string when all are equal.

    Raises:
        ValueError: a rank with a backward before its forward, or an unknown op.
    """
    for rank, ops in enumerate(ops_of_rank):
        _check(rank, ops)
    position = [0] * len(ops_of_rank)
    # Forwards, real or dummy, that a rank has run and could still answer a backward with.
    open_dummies = [0] * len(ops_of_rank)
    merged = ""
    while any(at < len(ops) for at, ops in zip(position, ops_of_rank, strict=True)):
        wanted = [ops[at] if at < len(ops) else "" for at, ops in zip(position, ops_of_rank, strict=True)]
        # A backward needs every rank that does not want one to hold a dummy's graph.
        ready = all(want == BACKWARD or open_dummies[rank] for rank, want in enumerate(wanted))
        op = BACKWARD if ready and BACKWARD in wanted and FORWARD not in wanted else FORWARD
        for rank, want in enumerate(wanted):
            if want == op:
                position[rank] += 1
            else:
                open_dummies[rank] += 1 if op == FORWARD else -1
        merged += op
    return merged


def _check(rank: int, ops: str) -> None:
    balance = 0
    for op in ops:
        if op not in (FORWARD, BACKWARD):
            raise ValueError(f"rank {rank}: expected ops of 'F' and 'B', received {ops!r}")
        balance += 1 if op == FORWARD else -1
        if balance < 0:
            raise ValueError(f"rank {rank}: a backward comes before its forward in {ops!r}")
