"""Learn: build the result of a call that ran, and keep what the next call can use."""

from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import torch

from tree_rl.training.context import StepCall, StepContext
from tree_rl.training.hand_overs import PlanRun, StepPlan, StepResult
from tree_rl.training.last_inference import LastInference
from tree_rl.training.loss.outputs import EdgeOutputs
from tree_rl.training.measured_calls import MeasuredCalls
from tree_rl.training.memory_budget import MemoryBudget
from tree_rl.training.routers.expert_load import ExpertLoad
from tree_rl.training.tree_options import TreeOptions


class Learner:
    """What a step has learnt from earlier calls; the planner reads it."""

    def __init__(self, context: StepContext, options: TreeOptions) -> None:
        """Start without measurements."""
        coef, hooks = options.router_aux_loss_coef, context.routers
        self._num_ranks = context.num_ranks
        self.budget = MemoryBudget(context, options.offload)
        self.calls = MeasuredCalls(context.model_shape, decides=not context.is_deterministic)
        """Times of updates, and the cost model fitted to them; the same on all ranks."""
        self.log_probs = LastInference()
        """Log-probs of the last inference."""
        self.load = None if coef is None or hooks is None else ExpertLoad(hooks, coef, context)
        """Load of experts; None unless `router_aux_loss_coef` is set."""

    def finish(self, plan: StepPlan, ran: PlanRun) -> StepResult:
        """The result of a call; also records its time, and after an inference its outputs."""
        call, batches = plan.call, plan.batches
        if self._num_ranks == 1:
            # With several ranks, Planner.plan has already learnt the previous call's time.
            self.calls.learn((self.calls.take_last(),))
        if call.trains:
            self.calls.note(call.rows, batches, ran.start, ran.end)
        place_F = np.concatenate([np.zeros(0, np.int64), *(batch.flat_f for batch in batches)])

        def in_row_order(parts: Sequence[torch.Tensor]) -> torch.Tensor:
            """Values [f, ...] of each micro-batch as [F, ...] in the order of the rows."""
            joined = torch.cat(list(parts))
            ordered = torch.empty_like(joined)
            ordered[torch.from_numpy(place_F).to(joined.device)] = joined
            return ordered

        outputs_of = [result.outputs.present() for result in ran.results]
        names = call.outputs if ran.results else ()
        routes = [result.routes_fLK for result in ran.results if result.routes_fLK is not None]
        result = StepResult(
            outputs=EdgeOutputs.of({name: in_row_order([found[name] for found in outputs_of]) for name in names}),
            routes_FLK=in_row_order(routes) if routes else None,
            losses=tuple(result.loss for result in ran.results),
            metrics=tuple(result.metrics for result in ran.results),
            micro_batches=batches,
            plan_seconds=plan.seconds,
            load=self.load.report() if self.load is not None and call.trains else None,
        )
        if not (call.trains or call.is_reference):
            self._remember(call, result)
        return result

    def _remember(self, call: StepCall, result: StepResult) -> None:
        """After an inference: keep values that the next update can reuse."""
        rows = call.rows
        if result.routes_FLK is not None:
            rows = replace(rows, routes_FLK=result.routes_FLK.cpu().numpy())
        if result.outputs.log_probs is not None:
            log_probs_F = result.outputs.log_probs.cpu()
            self.log_probs.remember(rows, log_probs_F.split(np.diff(rows.offsets).tolist()))
        if self.load is not None:
            self.load.remember(rows)
