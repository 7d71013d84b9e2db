"""Run: a plan's micro-batches, op by op in lock-step with all ranks: rows without a tree, whole forests, partitions."""

import time
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from functools import partial

import torch

from tree_rl.models.tree_inputs import TreeInputs
from tree_rl.training.context import StepCall, StepContext
from tree_rl.training.hand_overs import MicroBatchResult, PlanRun, StepPlan, Work
from tree_rl.training.loss.edges import edges_of_batch, tree_log_probs, tree_values
from tree_rl.training.loss.outputs import VALUES, Metrics, weighted_loss
from tree_rl.training.measured_calls import Stamp
from tree_rl.training.micro_batch import MicroBatch, live_tokens
from tree_rl.training.partitioned import offloaded_inputs, run_partitioned
from tree_rl.training.ranks.lock_step import BACKWARD, FORWARD, FORWARD_OF, TOWER_BACKWARD, TOWER_FORWARD
from tree_rl.training.routers.call_routers import close_routing, open_routing
from tree_rl.training.routers.expert_load import ExpertLoad
from tree_rl.training.tower import Tower, idle_tower
from tree_rl.tree.forest import Forest


class Runner:
    """Runs the plans of one step."""

    def __init__(self, context: StepContext, load: ExpertLoad | None) -> None:
        self._context, self._load = context, load
        self._now: Callable[[], Stamp] = _event if context.device.type == "cuda" else time.perf_counter

    def run(self, plan: StepPlan) -> PlanRun | None:
        """Follow the schedule; None if memory ran out on this rank and the call may be repeated."""
        context, call, load = self._context, plan.call, self._load
        if context.num_ranks > 1:
            for counter in context.counters:
                counter.start()
        results: list[MicroBatchResult] = []

        def work() -> Iterator[str]:
            for batch, known_f in zip(plan.batches, plan.known, strict=True):
                if batch.forest is None:
                    result = yield from run_flat(context, call, batch)
                elif batch.plan is None:
                    result = yield from run_whole(context, call, batch, load)
                else:
                    result = yield from run_partitioned(context, call, batch, load, known_f=known_f)
                results.append(result)

        start = self._now()
        try:
            dummy_ops = self.follow(plan, work())
        except torch.cuda.OutOfMemoryError as error:
            alive = live_tokens(plan.batches)
            if not plan.may_repeat or alive <= 1:
                error.add_note(f"lower tree.max_tokens (or set it to auto): {alive} unique tokens were alive")
                raise
            return None
        return PlanRun(results=tuple(results), dummy_ops=dummy_ops, start=start, end=self._now())

    def follow(self, plan: StepPlan, work: Iterator[str]) -> int:
        """Run this rank's ops along the schedule, and dummies where it has none; returns the number of dummy forwards.

        `work` yields the kind of each op before it runs.
        """
        trains, schedule = plan.call.trains, plan.schedule
        dummies: dict[str, list[torch.Tensor]] = {op: [] for op in FORWARD_OF.values()}
        count, last_backward = 0, schedule.rfind(BACKWARD)
        with nullcontext() if trains else torch.no_grad():
            wanted = next(work, None)
            for index, op in enumerate(schedule):
                # A tower's backward comes later still, if it comes at all: its parameters may be frozen.
                sync = self._context.gradient_sync(index >= last_backward >= 0) if trains else nullcontext()
                with sync, torch.profiler.record_function(f"{op}{index}"):
                    if wanted == op:
                        # Resuming the generator runs the op it announced, then returns the next one's kind.
                        wanted = next(work, None)
                    elif op in dummies:
                        count += 1
                        dummies[op].append(self.idle_forward(op))
                    elif (dummy := dummies[FORWARD_OF[op]].pop()).requires_grad:
                        dummy.backward()
        if wanted is not None:
            raise RuntimeError(
                f"the agreed schedule {schedule!r} ended before this rank's work, which wants {wanted!r}"
            )
        return count

    def idle_forward(self, op: str = FORWARD) -> torch.Tensor:
        """A forward of one token or image that keeps FSDP's collectives in step; returns a scalar 0 with graph."""
        if op == TOWER_FORWARD:
            return idle_tower(self._context)
        inputs = TreeInputs.from_forest(Forest.from_rows([[self._context.idle_token]]), self._context.device)
        return (self._context.forward(**inputs.model_kwargs()).logits * 0).sum().float()


def run_flat(context: StepContext, call: StepCall, batch: MicroBatch) -> Work:
    """Run rows without a tree, through the trainer's forward and loss."""
    yield FORWARD
    assert call.run_rows_flat is not None
    weighted = None if call.loss is None else partial(weighted_loss, call.loss, batch)
    loss, outputs, metrics = call.run_rows_flat(batch.rows, weighted)
    result = MicroBatchResult(outputs=outputs, loss=loss.detach().item(), metrics=metrics or [])
    if call.trains:
        yield BACKWARD
        (loss * context.loss_scale()).backward()
    return result


def run_whole(context: StepContext, call: StepCall, batch: MicroBatch, load: ExpertLoad | None) -> Work:
    """Run a forest in one forward; `load` counts the load of experts, if there are any."""
    tower = None if batch.images is None else Tower(context, batch.images)
    if tower is not None:
        yield TOWER_FORWARD
        tower.forward()
    yield FORWARD
    forest, ranks = batch.forest, context.ranks
    assert forest is not None
    routing = open_routing(context, call, batch, load)
    trace = None if routing is None else routing.open()
    with context.autocast(), offloaded_inputs(context, batch).of_forward() if call.trains else nullcontext():
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
            edges = partial(edges_of_batch, call.rows, batch, context.device, ranks=ranks)
            outputs = tree_log_probs(context.module, inputs, edges, extras=call.outputs)
        loss = torch.tensor(1.0, device=context.device)
        metrics: list[Metrics] = []
        if call.loss is not None:
            loss, metrics = weighted_loss(call.loss, batch, outputs)
    reported_loss, routes_fLK = loss.detach().item(), None
    if routing is not None and trace is not None:
        share = routing.close(trace)
        loss = loss if share is None else loss + share
        routes_fLK = close_routing(context, call, batch, load, routing)
    result = MicroBatchResult(outputs=outputs.detach(), loss=reported_loss, metrics=metrics, routes_fLK=routes_fLK)
    if call.trains:
        yield BACKWARD
        (loss * context.loss_scale()).backward()
        if tower is not None:
            yield TOWER_BACKWARD
            tower.backward()
    return result


def run_at_once(work: Work) -> MicroBatchResult:
    """Run a micro-batch without other ranks."""
    while True:
        try:
            next(work)
        except StopIteration as done:
            result: MicroBatchResult = done.value
            return result


def _event() -> torch.cuda.Event:
    event = torch.cuda.Event(enable_timing=True)
    event.record()
    return event
