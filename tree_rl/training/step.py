"""One optimisation step over trees: rows into forests, forests into micro-batches, all ranks in lock-step.

Each unique token runs once. Its outputs are scattered back to the rows and the rows' own loss follows, so gradients are
those of the rows run alone (paper, section 3).
"""

import logging
import time
from collections.abc import Iterator
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, replace
from itertools import chain
from typing import Any, NoReturn

import numpy as np
import torch
from torch import nn

from tree_rl.models.support import check_dropout
from tree_rl.models.tree_inputs import TreeInputs
from tree_rl.training.context import Group, StepCall, StepContext
from tree_rl.training.loss.outputs import EdgeOutputs
from tree_rl.training.loss.rows_loss import Loss
from tree_rl.training.measured_calls import MeasuredCalls
from tree_rl.training.memory.chosen import gradients_to_come, memory_of
from tree_rl.training.micro_batch_runs import FlatBatchRun, MicroBatchRun, PartitionedBatchRun, WholeBatchRun
from tree_rl.training.options import AUTO, TreeOptions
from tree_rl.training.planning.budget import AutoBudget, Budget
from tree_rl.training.planning.micro_batches import (
    MicroBatch,
    largest_forward,
    live_tokens,
    plan_micro_batches,
    predicted_peak,
)
from tree_rl.training.planning.plan_memory import PlanMemory
from tree_rl.training.ranks.lock_step import Agreement, agree_on_ops, run_in_step
from tree_rl.training.ranks.shared_plan import shared_plan
from tree_rl.training.ranks.stand_in import OpSize, op_sizes, stand_in_work
from tree_rl.training.result import StepResult, in_row_order
from tree_rl.training.routers.call_routers import CallRouters
from tree_rl.training.routers.expert_load import ExpertLoad
from tree_rl.training.row_memory import RowMemory
from tree_rl.training.rows import Rows
from tree_rl.training.self_check import run_self_check
from tree_rl.tree.forest import Forest, RowError

logger = logging.getLogger(__name__)


@dataclass(kw_only=True, slots=True)
class _Attempt:
    """A call that all ranks have agreed to run."""

    call: StepCall
    budget: Budget
    batches: list[MicroBatch]
    runs: list[MicroBatchRun]
    agreement: Agreement
    plan_seconds: float

    @property
    def live_tokens(self) -> int:
        """Most unique tokens whose graphs are alive at a time."""
        return live_tokens(self.batches)


class TreeStep:
    """Runs a model over rows as trees, for an update (`run`) or without gradients (`infer`).

    It keeps what one call teaches the next: log-probs of rows (until `forget`), partition plans, the token budget.
    """

    def __init__(
        self,
        model: nn.Module,
        options: TreeOptions | None = None,
        group: Group = None,
        *,
        context: StepContext | None = None,
    ) -> None:
        """Bind a model.

        Args:
            model: prepared by `tree_rl.models.use_tree_attention` (and `use_edge_head`, to save memory).
            options: how rows become trees; None takes the defaults.
            group: data-parallel ranks that run in lock-step; None is the default group, where there is one.
            context: a host's own; it replaces `model` and `group`.

        Raises:
            UnsupportedModelError: the model draws dropout masks.
        """
        self.options = TreeOptions() if options is None else options
        self.context = StepContext.of(model, group) if context is None else context
        check_dropout(self.context.module)
        self.budget = AutoBudget(num_ranks=self.context.num_ranks, group=self.context.data_parallel)
        self.known_log_probs = RowMemory()
        self.plans = PlanMemory()
        self.memory = memory_of(self.context, self.options)
        shape, decides = self.context.model_shape, not self.context.is_deterministic
        self.calls = MeasuredCalls(shape, self.context.device, decides=decides)
        coef, hooks = self.options.router_aux_loss_coef, self.context.routers
        self.load = None if coef is None or hooks is None else ExpertLoad(hooks, coef, self.context)
        self.dummy_ops = 0
        """One-token forwards of the last call, which kept this rank in step."""
        self.out_of_memory = 0
        """Calls that ran again because a rank ran out of memory."""
        self._checked: set[bool] = set()
        self.self_check_error: float | None = None
        """Largest difference that the self-check found; None before it ran."""

    def run(self, rows: Rows, loss: Loss, **asked: Any) -> StepResult:
        """Forward and backward of all rows; gradients add up in the parameters' `grad`.

        Args:
            rows: of this rank; none is fine.
            loss: from outputs [f] of some rows and their indices to a scalar and metrics; called once per micro-batch,
                and once per partition where a forest runs in partitions.
            asked: fields of `StepCall`: `outputs`, `is_separable`, `flat_rows`, `host_tokens`, `records_routes`.

        Raises:
            RowError: a row that cannot be trained on, named.
            RuntimeError: another rank refused its rows.
            TreeMismatchError: the self-check failed.
        """
        return self.run_call(StepCall(rows=rows, loss=loss, trains=True, **asked))

    def infer(self, rows: Rows, loss: Loss | None = None, **asked: Any) -> StepResult:
        """Outputs of all rows without gradients; log-probs are remembered for the next `run`.

        Args:
            rows: of this rank.
            loss: evaluated where given.
            asked: as for `run`, and `is_reference`.

        Raises:
            RowError, RuntimeError, TreeMismatchError: as `run`.
        """
        return self.run_call(StepCall(rows=rows, loss=loss, trains=False, **asked))

    def refuse(self, error: RowError) -> NoReturn:
        """Tell the other ranks that this one cannot read its rows, so that none of them waits.

        Raises:
            RowError: always, the one given.
        """
        self._agree("", is_refused=True, may_repeat=False)
        raise error

    def forget(self) -> None:
        """The weights have moved: what the last inference found out is stale."""
        self.known_log_probs.forget()
        if self.load is not None:
            self.load.memory.forget()

    def run_call(self, call: StepCall) -> StepResult:
        """`run` or `infer`, as a host asks for it; runs again with half the budget if memory runs out.

        Raises:
            RowError, RuntimeError, TreeMismatchError: as `run`.
        """
        module = self.context.module
        # Gradients of an earlier call would be lost with those of a failed one; then the error is raised.
        is_first = not call.trains or all(parameter.grad is None for parameter in module.parameters())
        # Routes that ranks gather are no exchange that a rank knows how to stand in for.
        stands_in = self.context.ranks is None or self.context.routers is None
        result = self._run(call, may_repeat=is_first and self.context.may_repeat and stands_in)
        if result is None:
            if call.trains:
                module.zero_grad()
            result = self._run(call, may_repeat=False)
            assert result is not None
        return result

    def _run(self, call: StepCall, *, may_repeat: bool) -> StepResult | None:
        """The call's result; None if a rank ran out of memory and all of them shall run the call again."""
        attempt = self._plan(call, may_repeat=may_repeat)
        self._check_once(attempt)
        if self.load is not None and not self._charge_load(self.load, attempt):
            return None
        base_bytes = self._base_bytes(call)
        with self.calls.timed(call.rows, attempt.batches) if call.trains else nullcontext():
            is_done = self._follow(attempt.runs, attempt.agreement, attempt, trains=call.trains)
        if not is_done:
            return None
        if base_bytes is not None:
            self._learn_budget(base_bytes, attempt)
        result = self._result(attempt)
        if not (call.trains or call.is_reference):
            self._remember(call, result)
        return result

    def _plan(self, call: StepCall, *, may_repeat: bool) -> _Attempt:
        """Cut the rows into micro-batches and agree with all ranks on the ops before anyone computes."""
        started = time.perf_counter()
        context, options = self.context, self.options
        is_routed = call.records_routes or call.rows.routes_FLK is not None
        if call.flat_rows is None or context.always_forest or is_routed or context.ranks is not None:
            options = replace(options, mode="tree")
        budget = self.budget.budget(options.max_tokens, call.host_tokens)
        failure: RowError | None = None
        batches: list[MicroBatch] = []
        try:
            chooser = None if self.memory is None else self.memory.chooser(self.budget.working_scale)
            batches = plan_micro_batches(call.rows, options, budget, self.calls.model, self.plans, chooser)
        except RowError as error:
            failure = error
        if self.memory is not None:
            self.memory.tell(batches, budget.unique_tokens)
        runs = [self._bind(call, batch) for batch in batches]
        ops = "".join(run.ops for run in runs)
        shared = shared_plan(context.ranks, call.rows, batches)
        told = self.calls.take_last()
        agreement = self._agree(ops, is_refused=failure is not None, may_repeat=may_repeat, shared=shared, told=told)
        if failure is not None:
            raise failure
        if agreement.is_refused:
            raise RuntimeError("another data-parallel rank refused its rows; its own error names the row")
        self.calls.learn(agreement.told)
        return _Attempt(
            call=call,
            budget=budget,
            batches=batches,
            runs=runs,
            agreement=agreement,
            plan_seconds=time.perf_counter() - started,
        )

    def _agree(self, ops: str, *, is_refused: bool, may_repeat: bool, **beside: Any) -> Agreement:
        context = self.context
        return agree_on_ops(
            ops,
            is_refused=is_refused,
            may_repeat=may_repeat,
            num_ranks=context.num_ranks,
            group=context.data_parallel,
            **beside,
        )

    def _bind(self, call: StepCall, batch: MicroBatch) -> MicroBatchRun:
        """A micro-batch as work."""
        if batch.forest is None:
            return FlatBatchRun(self.context, call, batch)
        routers = CallRouters(hooks=self.context.routers, load=self.load, ranks=self.context.ranks)
        if batch.plan is None:
            return WholeBatchRun(self.context, call, batch, routers)
        is_coupled = call.trains and not call.is_separable
        known = self.known_log_probs.recall(call.rows, batch.rows) if is_coupled else None
        known_F = None if known is None else torch.cat(known)
        return PartitionedBatchRun(self.context, call, batch, routers, known_F=known_F)

    def _check_once(self, attempt: _Attempt) -> None:
        """The self-check, before the first batch of a host that can run rows without a tree, or that shares tokens."""
        has_other_way = attempt.call.flat_rows is not None or self.context.ranks is not None
        # A reference policy inside the actor runs without the adapters that train.
        if not self.options.self_check or attempt.call.is_reference in self._checked or not has_other_way:
            return
        self._checked.add(attempt.call.is_reference)
        most = min(attempt.budget.unique_tokens, attempt.budget.flat_tokens)
        error = run_self_check(
            self.context,
            attempt.call,
            attempt.batches,
            # Rows that run alone are not shared.
            max_tokens=most // self.context.sharing_ranks,
        )
        self.self_check_error = max(error, self.self_check_error or 0.0)

    def _charge_load(self, load: ExpertLoad, attempt: _Attempt) -> bool:
        """What imbalance of experts costs in this call; False if a rank ran out of memory while counting."""
        load.begin()
        call = attempt.call
        if not call.trains:
            return True
        if load.must_count(call.rows):
            counting = replace(call, loss=None, trains=False)
            runs = [self._bind(counting, batch) for batch in attempt.batches]
            ops = "".join(run.ops for run in runs)
            agreement = self._agree(ops, is_refused=False, may_repeat=attempt.agreement.may_repeat)
            if not self._follow(runs, agreement, attempt, trains=False):
                return False
        load.charge(call.rows)
        return True

    def _follow(self, runs: list[MicroBatchRun], agreement: Agreement, attempt: _Attempt, *, trains: bool) -> bool:
        """Run in lock-step; False if a rank ran out of memory and all shall run the call again."""
        work: Iterator[str] = chain.from_iterable(run.work() for run in runs)
        sync_context = self.context.gradient_sync if trains else _no_sync
        collectives, exchanges = self.context.collectives, self.context.exchanges
        exchanges.start()
        is_out_of_memory = False
        if collectives is not None:
            collectives.start()
        with nullcontext() if trains else torch.no_grad():
            try:
                self.dummy_ops = run_in_step(agreement.schedule, work, self.idle_forward, sync_context)
            except torch.cuda.OutOfMemoryError as error:
                if not agreement.may_repeat or attempt.live_tokens <= 1:
                    error.add_note(
                        f"lower tree.max_tokens (or set it to auto): {attempt.live_tokens} unique tokens were alive"
                    )
                    raise
                is_out_of_memory = True
            if is_out_of_memory:
                # Outside the handler, so that the frames of the failed run, and what they hold, are gone.
                work = stand_in_work(self.context, attempt.call, self._sizes(runs, attempt))
                runs.clear()
                exchanges.restart()
                if collectives is not None:
                    collectives.restart()
                torch.cuda.empty_cache()
                if collectives is not None or self.context.ranks is not None:
                    run_in_step(agreement.schedule, work, self.idle_forward, sync_context)
                exchanges.start()
        return not agreement.may_repeat or self._has_room(is_out_of_memory, attempt)

    def _sizes(self, runs: list[MicroBatchRun], attempt: _Attempt) -> list[OpSize]:
        """Of all own ops, where other ranks wait for this one's part in them; none else."""
        ranks, call = self.context.ranks, attempt.call
        if ranks is None:
            return []
        pairs = zip(attempt.batches, runs, strict=True)
        return [size for batch, run in pairs for size in op_sizes(call, batch, run.ops, ranks)]

    def _has_room(self, is_out_of_memory: bool, attempt: _Attempt) -> bool:
        """Whether no rank ran out of memory; if one did, all take half the budget."""
        smaller = largest_forward(attempt.batches) // 2
        if self.memory is not None:
            most = attempt.budget.unique_tokens
            smaller = self.memory.smaller_budget(attempt.batches, self.budget.working_scale, most)
        tokens = self.budget.shrink_after(is_out_of_memory, smaller)
        if tokens is None:
            return True
        self.out_of_memory += 1
        logger.warning(
            "CUDA ran out of memory%s; all ranks repeat the step with tree.max_tokens=%d",
            " on this rank" if is_out_of_memory else " on another rank",
            tokens,
        )
        return False

    def idle_forward(self) -> torch.Tensor:
        """The smallest forward that keeps FSDP's collectives in step; a scalar 0 that can be differentiated."""
        inputs = TreeInputs.from_forest(Forest.from_rows([[0]]), self.context.device)
        return (self.context.forward(**inputs.model_kwargs()).logits * 0).sum().float()

    def _base_bytes(self, call: StepCall) -> int | None:
        """Memory before the first update on a GPU, from which `max_tokens: auto` learns; None for any other call."""
        learns = self.options.max_tokens == AUTO and self.budget.tokens is None and call.trains
        if not learns or self.context.device.type != "cuda":
            return None
        torch.cuda.reset_peak_memory_stats()
        return torch.cuda.memory_allocated() + self.context.pending_bytes() + gradients_to_come(self.context.module)

    def _learn_budget(self, base_bytes: int, attempt: _Attempt) -> None:
        measured = {
            "base_bytes": base_bytes,
            "peak_bytes": torch.cuda.max_memory_allocated() + self.context.pending_bytes(),
            "total_bytes": torch.cuda.get_device_properties(torch.cuda.current_device()).total_memory,
        }
        if self.memory is None:
            self.budget.learn(live_tokens=attempt.live_tokens, **measured)
            return
        batches = attempt.batches
        self.budget.learn_with(self.memory.model, lambda model: predicted_peak(batches, model).device, **measured)

    def _result(self, attempt: _Attempt) -> StepResult:
        call, batches = attempt.call, attempt.batches
        results = [run.result for run in attempt.runs if run.result is not None]
        outputs_of = [result.outputs.present() for result in results]
        names = call.outputs if results else ()
        outputs = {name: in_row_order([found[name] for found in outputs_of], batches, call.rows) for name in names}
        routes = [result.routes_fLK for result in results if result.routes_fLK is not None]
        return StepResult(
            outputs=EdgeOutputs.of(outputs),
            routes_FLK=in_row_order(routes, batches, call.rows) if routes else None,
            losses=tuple(result.loss for result in results),
            metrics=tuple(result.metrics for result in results),
            micro_batches=tuple(batches),
            plan_seconds=attempt.plan_seconds,
            load=self.load.report() if self.load is not None and call.trains else None,
        )

    def _remember(self, call: StepCall, result: StepResult) -> None:
        """After an inference: values that the next update may take instead of computing them again."""
        rows = call.rows
        if result.routes_FLK is not None:
            rows = replace(rows, routes_FLK=result.routes_FLK.cpu().numpy())
        if result.outputs.log_probs is not None:
            self.known_log_probs.remember(rows, result.outputs.log_probs.cpu().split(np.diff(rows.offsets).tolist()))
        if self.load is not None:
            self.load.remember(rows)


def _no_sync(is_last: bool) -> AbstractContextManager[Any]:
    return nullcontext()
