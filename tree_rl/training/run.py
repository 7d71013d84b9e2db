"""Run: a plan's micro-batches, op by op in lock-step with all ranks: rows without a tree, whole forests, partitions."""

import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from typing import Any

import torch

from tree_rl.models.tree_inputs import TreeInputs
from tree_rl.training.context import StepCall, StepContext
from tree_rl.training.hand_overs import MicroBatchResult, Ran, StepPlan
from tree_rl.training.loss.edges import edges_of_rows, tree_log_probs, tree_values
from tree_rl.training.loss.outputs import VALUES
from tree_rl.training.loss.rows_loss import Metrics, weigh
from tree_rl.training.measured_calls import Stamp
from tree_rl.training.micro_batch import MicroBatch, live_tokens
from tree_rl.training.partitioned import offloaded_inputs, run_partitioned
from tree_rl.training.ranks.lock_step import BACKWARD, FORWARD, FORWARD_OF, TOWER_BACKWARD, TOWER_FORWARD
from tree_rl.training.routers.call_routers import CallRouters
from tree_rl.training.routers.expert_load import ExpertLoad
from tree_rl.training.tower import Tower, idle_tower
from tree_rl.tree.forest import Forest


class Runner:
    """Runs the plans of one step."""

    def __init__(self, context: StepContext, load: ExpertLoad | None) -> None:
        hooks = context.routers
        self._context = context
        self._routers = None if hooks is None else CallRouters(hooks=hooks, load=load, ranks=context.ranks)
        self._now: Callable[[], Stamp] = _event if context.device.type == "cuda" else time.perf_counter

    def run(self, plan: StepPlan) -> Ran | None:
        """Follow the schedule; None if memory ran out on this rank and the call may be repeated."""
        context, call, routers = self._context, plan.call, self._routers
        if context.num_ranks > 1:
            for counter in context.counted:
                counter.start()
        results: list[MicroBatchResult] = []

        def work() -> Iterator[str]:
            for batch, known_f in zip(plan.batches, plan.known, strict=True):
                if batch.forest is None:
                    yield from run_flat(context, call, batch, results)
                elif batch.plan is None:
                    yield from run_whole(context, call, batch, routers, results)
                else:
                    yield from run_partitioned(context, call, batch, routers, results, known_f=known_f)

        start = self._now()
        sync_context = context.gradient_sync if call.trains else _no_sync
        try:
            with nullcontext() if call.trains else torch.no_grad():
                dummy_ops = run_in_lock_step(plan.schedule, work(), self.idle_forward, sync_context)
        except torch.cuda.OutOfMemoryError as error:
            alive = live_tokens(plan.batches)
            if not plan.may_repeat or alive <= 1:
                error.add_note(f"lower tree.max_tokens (or set it to auto): {alive} unique tokens were alive")
                raise
            return None
        return Ran(results=tuple(results), dummy_ops=dummy_ops, start=start, end=self._now())

    def idle_forward(self, op: str = FORWARD) -> torch.Tensor:
        """A forward of one token or image that keeps FSDP's collectives in step; returns a scalar 0 with graph."""
        if op == TOWER_FORWARD:
            return idle_tower(self._context)
        inputs = TreeInputs.from_forest(Forest.from_rows([[0]]), self._context.device)
        return (self._context.forward(**inputs.model_kwargs()).logits * 0).sum().float()


def run_in_lock_step(
    schedule: str,
    work: Iterator[str],
    dummy_forward: Callable[[str], torch.Tensor],
    sync_context: Callable[[bool], AbstractContextManager[Any]],
) -> int:
    """Follow the schedule with this rank's ops, and dummies for the others; returns the number of dummy forwards.

    Args:
        schedule: ops that all ranks have agreed on.
        work: this rank's ops; yields the kind of each op before it runs.
        dummy_forward: runs a dummy of a forward op; returns a scalar with graph, or without one if nothing trains.
        sync_context: `StepContext.gradient_sync`.
    """
    dummies: dict[str, list[torch.Tensor]] = {op: [] for op in FORWARD_OF.values()}
    count = 0
    last_backward = schedule.rfind(BACKWARD)
    wanted = next(work, None)
    for index, op in enumerate(schedule):
        # A tower's backward comes later still, if it comes at all: its parameters may be frozen.
        with sync_context(index >= last_backward >= 0), torch.profiler.record_function(f"{op}{index}"):
            if wanted == op:
                # Resuming the generator runs the op it announced, then returns the next one's kind.
                wanted = next(work, None)
            elif op in dummies:
                count += 1
                dummies[op].append(dummy_forward(op))
            elif (dummy := dummies[FORWARD_OF[op]].pop()).requires_grad:
                dummy.backward()
    if wanted is not None:
        raise RuntimeError(f"the agreed schedule {schedule!r} ended before this rank's work, which wants {wanted!r}")
    return count


def run_flat(context: StepContext, call: StepCall, batch: MicroBatch, results: list[MicroBatchResult]) -> Iterator[str]:
    """Run rows without a tree, through the trainer's forward and loss; yields the kind of each op before it runs."""
    yield FORWARD
    assert call.run_rows_flat is not None
    weighted = None if call.loss is None else weigh(call.loss, batch)
    loss, outputs, metrics = call.run_rows_flat(batch.rows, weighted)
    results.append(MicroBatchResult(outputs=outputs, loss=loss.detach().item(), metrics=metrics or []))
    if call.trains:
        yield BACKWARD
        (loss * context.loss_scale()).backward()


def run_whole(
    context: StepContext,
    call: StepCall,
    batch: MicroBatch,
    routers: CallRouters | None,
    results: list[MicroBatchResult],
) -> Iterator[str]:
    """Run a forest in one forward; yields the kind of each op before it runs."""
    tower = None if batch.images is None else Tower(context, batch.images)
    if tower is not None:
        yield TOWER_FORWARD
        tower.forward()
    yield FORWARD
    forest, ranks = batch.forest, context.ranks
    assert forest is not None
    routing = None if routers is None else routers.open(call, batch, context.device)
    trace = None if routing is None else routing.open()
    offloads = call.trains and batch.saving.offloaded_layers > 0
    with context.autocast(), offloaded_inputs(context, batch).of_forward() if offloads else nullcontext():
        inputs = TreeInputs.from_forest(
            forest,
            context.device,
            router_trace=trace,
            tile_tokens=batch.saving.tile_tokens,
            ranks=ranks,
            images=None if tower is None else tower.tokens(),
        )
        if VALUES in call.outputs:
            outputs = tree_values(context.module, forest, inputs)
        else:
            edges = partial(edges_of_rows, forest, call.rows, batch.rows, context.device, ranks=ranks)
            outputs = tree_log_probs(context.module, inputs, edges, extras=call.outputs)
        loss = torch.tensor(1.0, device=context.device)
        metrics: list[Metrics] = []
        if call.loss is not None:
            loss, metrics = weigh(call.loss, batch)(outputs, batch.rows)
    reported_loss, routes_fLK = loss.detach().item(), None
    if routers is not None and routing is not None and trace is not None:
        share = routing.close(trace)
        loss = loss if share is None else loss + share
        routes_fLK = routers.close(routing, call, batch)
    results.append(
        MicroBatchResult(outputs=outputs.detach(), loss=reported_loss, metrics=metrics, routes_fLK=routes_fLK)
    )
    if call.trains:
        yield BACKWARD
        (loss * context.loss_scale()).backward()
        if tower is not None:
            yield TOWER_BACKWARD
            tower.backward()


def _event() -> torch.cuda.Event:
    event = torch.cuda.Event(enable_timing=True)
    event.record()
    return event


def _no_sync(is_last: bool) -> AbstractContextManager[Any]:
    return nullcontext()
