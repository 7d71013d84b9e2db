"""All ranks run one sequence of forwards and backwards, so that FSDP's collectives have the same order everywhere.

Ranks agree on it beforehand. It keeps the order of each rank's ops; a rank without an op to run runs a dummy of one
token, or of one image.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch.distributed

FORWARD, BACKWARD = "F", "B"
TOWER_FORWARD, TOWER_BACKWARD = "V", "W"
"""Ops of the tower that reads images, around those of the forest with the images."""
FORWARD_OF = {BACKWARD: FORWARD, TOWER_BACKWARD: TOWER_FORWARD}


@dataclass(frozen=True, kw_only=True, slots=True)
class Agreement:
    """What the ranks agree on before any of them computes."""

    schedule: str
    """Ops that all ranks follow."""
    is_refused: bool
    """True if any rank refused its rows."""
    may_repeat: bool
    """True if every rank can run the call again from the start."""
    payloads: tuple[Any, ...] = ()
    """The `payload` of each rank, in rank order."""


SharedPlan = tuple[tuple[int, ...], bytes]
"""Global ranks that share tokens, and a digest of the rows and micro-batches of one of them."""


def agree_on_ops(
    ops: str,
    group: torch.distributed.ProcessGroup | None,
    *,
    is_refused: bool = False,
    may_repeat: bool = False,
    shared: SharedPlan | None = None,
    payload: Any = None,
) -> Agreement:
    """Agree with the other ranks on how a call runs.

    Args:
        ops: this rank's ops.
        group: the ranks that run in lock-step.
        is_refused: True if this rank refused its rows.
        may_repeat: True if this rank can run the call again without losing anything.
        shared: this rank's plan under sequence parallelism.
        payload: anything else to send to all ranks; it is pickled.

    Raises:
        RuntimeError: ranks that share tokens have planned differently; all ranks raise it.
    """
    gathered: list[Any] = [None] * torch.distributed.get_world_size(group)
    torch.distributed.all_gather_object(gathered, (ops, is_refused, may_repeat, shared, payload), group=group)
    ops_of_rank, refused, repeatable, plans, payloads = zip(*gathered, strict=True)
    if not any(refused):
        _check_shared(plans)
    return Agreement(
        schedule="" if any(refused) else merge_ops(list(ops_of_rank)),
        is_refused=any(refused),
        may_repeat=all(repeatable),
        payloads=payloads,
    )


def _check_shared(plans: Sequence[SharedPlan | None]) -> None:
    digests: dict[tuple[int, ...], set[bytes]] = {}
    for ranks, digest in (plan for plan in plans if plan is not None):
        digests.setdefault(ranks, set()).add(digest)
    unlike = [list(ranks) for ranks, found in digests.items() if len(found) > 1]
    if unlike:
        raise RuntimeError(
            f"ranks {unlike[0]} share the tokens of their rows, but their rows or plans differ; pass equal rows to all "
            "ranks of a sequence-parallel group"
        )


def merge_ops(ops_of_rank: Sequence[str]) -> str:
    """One deterministic sequence of ops that contains every rank's ops in order; if all are equal, it is their string.

    Whenever any rank wants a forward, a forward comes next. Ranks without one run a dummy, which they can later use to
    take part in a backward: the sequence never asks a rank for more backwards than it has run forwards. A tower's
    backward comes as soon as all ranks can take part.

    Args:
        ops_of_rank: one string of ops per rank; every "B" comes after its "F", every "W" after its "V".

    Raises:
        ValueError: a rank with a backward before its forward, or an unknown op.
    """
    for rank, ops in enumerate(ops_of_rank):
        _check(rank, ops)
    position = [0] * len(ops_of_rank)
    # Dummy forwards of each rank whose backward has not run yet.
    open_dummies = {op: [0] * len(ops_of_rank) for op in FORWARD_OF.values()}
    merged = ""
    while any(at < len(ops) for at, ops in zip(position, ops_of_rank, strict=True)):
        wanted = [ops[at] if at < len(ops) else "" for at, ops in zip(position, ops_of_rank, strict=True)]
        op = _next_op(wanted, open_dummies)
        for rank, want in enumerate(wanted):
            if want == op:
                position[rank] += 1
            else:
                open_dummies[FORWARD_OF.get(op, op)][rank] += -1 if op in FORWARD_OF else 1
        merged += op
    return merged


def _next_op(wanted: Sequence[str], open_dummies: dict[str, list[int]]) -> str:
    def is_ready(backward: str) -> bool:
        # Every rank that does not want this backward needs the graph of a dummy.
        dummies = zip(wanted, open_dummies[FORWARD_OF[backward]], strict=True)
        return all(want == backward or number for want, number in dummies)

    if TOWER_BACKWARD in wanted and is_ready(TOWER_BACKWARD):
        return TOWER_BACKWARD
    forward = next((op for op in (TOWER_FORWARD, FORWARD) if op in wanted), None)
    if forward is not None:
        return forward
    backward = BACKWARD if BACKWARD in wanted else TOWER_BACKWARD
    return backward if is_ready(backward) else FORWARD_OF[backward]


def _check(rank: int, ops: str) -> None:
    balance = dict.fromkeys(FORWARD_OF.values(), 0)
    for op in ops:
        forward = FORWARD_OF.get(op, op)
        if forward not in balance:
            raise ValueError(f"rank {rank}: expected ops of 'F' and 'B' (a tower's: 'V' and 'W'), received {ops!r}")
        balance[forward] += 1 if op == forward else -1
        if balance[forward] < 0:
            raise ValueError(f"rank {rank}: a backward comes before its forward in {ops!r}")
