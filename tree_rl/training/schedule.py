"""One order of forwards and backwards for all ranks: FSDP's collectives must come in the same sequence everywhere.

Each rank keeps the order of its own ops; where a rank has no op of the agreed kind, it runs a tiny dummy.
"""

from collections.abc import Sequence

FORWARD, BACKWARD = "F", "B"


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
