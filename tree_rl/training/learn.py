"""Learn: build the result of a call that ran, and keep what the next call can use."""

from dataclasses import replace

import numpy as np
import torch

from tree_rl.cost.memory.budget import room_beside
from tree_rl.training.context import StepCall, StepContext
from tree_rl.training.loss.outputs import EdgeOutputs
from tree_rl.training.micro_batch import live_tokens, predicted_peak
from tree_rl.training.planning.knowledge import Knowledge
from tree_rl.training.planning.planner import StepPlan
from tree_rl.training.planning.step_memory import gradients_to_come
from tree_rl.training.result import StepResult, in_row_order
from tree_rl.training.run import Ran


class Learner:
    """Turns what a call ran into its result and adds to the step's knowledge."""

    def __init__(self, context: StepContext, knowledge: Knowledge) -> None:
        self._context, self._knowledge = context, knowledge

    def finish(self, plan: StepPlan, ran: Ran) -> StepResult:
        """The result of a call; also records its time, and after an inference its outputs."""
        call, batches = plan.call, plan.batches
        calls, load = self._knowledge.calls, self._knowledge.load
        if self._context.num_ranks == 1:
            # With several ranks, Planner.plan has already learnt the previous call's time.
            calls.learn((calls.take_last(),))
        if call.trains:
            calls.note(call.rows, batches, ran.start, ran.end)
        outputs_of = [result.outputs.present() for result in ran.results]
        names = call.outputs if ran.results else ()
        outputs = {name: in_row_order([found[name] for found in outputs_of], batches, call.rows) for name in names}
        routes = [result.routes_fLK for result in ran.results if result.routes_fLK is not None]
        result = StepResult(
            outputs=EdgeOutputs.of(outputs),
            routes_FLK=in_row_order(routes, batches, call.rows) if routes else None,
            losses=tuple(result.loss for result in ran.results),
            metrics=tuple(result.metrics for result in ran.results),
            micro_batches=batches,
            plan_seconds=plan.seconds,
            load=load.report() if load is not None and call.trains else None,
        )
        if not (call.trains or call.is_reference):
            self._remember(call, result)
        return result

    def bytes_before_update(self) -> int:
        """Device memory in use before an update, plus what the update will allocate and keep."""
        torch.cuda.reset_peak_memory_stats()
        return torch.cuda.memory_allocated() + self._context.pending_bytes() + gradients_to_come(self._context.module)

    def learn_budget(self, plan: StepPlan, base_bytes: int) -> None:
        """Set the token budget from the peak memory of the update that ran `plan`.

        Args:
            plan: the update's plan.
            base_bytes: result of `bytes_before_update`.
        """
        used_bytes = torch.cuda.max_memory_allocated() + self._context.pending_bytes() - base_bytes
        total_bytes = torch.cuda.get_device_properties(torch.cuda.current_device()).total_memory
        room, budget, memory = (
            room_beside(base_bytes, total_bytes),
            self._knowledge.budget,
            self._knowledge.memory_model,
        )
        if memory is None:
            budget.learn(live_tokens(plan.batches), used_bytes=used_bytes, room=room)
            return
        budget.learn_with(
            memory.model, lambda model: predicted_peak(plan.batches, model).device, used_bytes=used_bytes, room=room
        )

    def _remember(self, call: StepCall, result: StepResult) -> None:
        """After an inference: keep values that the next update can reuse."""
        rows = call.rows
        if result.routes_FLK is not None:
            rows = replace(rows, routes_FLK=result.routes_FLK.cpu().numpy())
        if result.outputs.log_probs is not None:
            log_probs_F = result.outputs.log_probs.cpu()
            self._knowledge.log_probs.remember(rows, log_probs_F.split(np.diff(rows.offsets).tolist()))
        if self._knowledge.load is not None:
            self._knowledge.load.remember(rows)
