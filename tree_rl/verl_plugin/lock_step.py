"""Ranks run the same sequence of forwards and backwards: agreed beforehand, gaps filled with one-token dummies."""

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from typing import Any

import torch
import torch.distributed

from tree_rl.training.schedule import BACKWARD, FORWARD, merge_ops


def agree_on_ops(ops: str, failed: bool, group: torch.distributed.ProcessGroup | None) -> tuple[str, bool]:
    """The op sequence that all ranks follow, and whether any rank refused its rows.

    Args:
        ops: this rank's own ops, "F" and "B".
        failed: this rank refused its rows.
        group: data-parallel group.
    """
    world = torch.distributed.get_world_size(group)
    if world == 1:
        return ops, failed
    gathered: list[Any] = [None] * world
    torch.distributed.all_gather_object(gathered, (ops, failed), group=group)
    any_failed = any(other for _, other in gathered)
    return ("" if any_failed else merge_ops([theirs for theirs, _ in gathered])), any_failed


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
