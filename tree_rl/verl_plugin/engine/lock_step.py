"""Ranks run the same sequence of forwards and backwards: agreed beforehand, gaps filled with one-token dummies."""

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed

from tree_rl.training.schedule import BACKWARD, FORWARD, merge_ops


@dataclass(frozen=True, kw_only=True, slots=True)
class Agreement:
    """What the ranks settle before anyone computes."""

    schedule: str
    """Op sequence that all ranks follow."""
    is_refused: bool
    """Whether any rank refused its rows."""
    may_repeat: bool
    """Whether every rank could run the call again from the start."""


def agree_on_ops(
    ops: str, *, is_refused: bool, may_repeat: bool, group: torch.distributed.ProcessGroup | None
) -> Agreement:
    """Settle a call with the other ranks.

    Args:
        ops: this rank's own ops, "F" and "B".
        is_refused: this rank refused its rows.
        may_repeat: this rank would lose nothing by running the call again.
        group: data-parallel group.
    """
    world = torch.distributed.get_world_size(group)
    if world == 1:
        return Agreement(schedule=ops, is_refused=is_refused, may_repeat=may_repeat)
    gathered: list[Any] = [None] * world
    torch.distributed.all_gather_object(gathered, (ops, is_refused, may_repeat), group=group)
    ops_of_rank, refused, repeatable = zip(*gathered, strict=True)
    return Agreement(
        schedule="" if any(refused) else merge_ops(list(ops_of_rank)),
        is_refused=any(refused),
        may_repeat=all(repeatable),
    )


def run_in_step(
    schedule: str,
    work: Iterator[str],
    dummy_forward: Callable[[], torch.Tensor],
    sync_context: Callable[[bool], AbstractContextManager[Any]],
) -> int:
    """Follow the schedule with this rank's work; returns the number of dummies it ran.

    Args:
        schedule: agreed ops.
        work: yields the kind of each op before it runs.
        dummy_forward: a one-token forward; its result can be differentiated.
        sync_context: gradient synchronisation of one op; True for the last backward of the call.
    """
    dummies: list[torch.Tensor] = []
    count = 0
    last_backward = schedule.rfind(BACKWARD)
    wanted = next(work, None)
    for index, op in enumerate(schedule):
        with sync_context(index == last_backward), torch.profiler.record_function(f"{op}{index}"):
            if wanted == op:
                wanted = next(work, None)
            elif op == FORWARD:
                count += 1
                dummies.append(dummy_forward())
            else:
                dummies.pop().backward()
    if wanted is not None:
        raise RuntimeError(f"the agreed schedule {schedule!r} ended before this rank's work, which wants {wanted!r}")
    return count
