"""What a step has learnt from earlier calls: the planner reads it, the learner adds to it."""

from dataclasses import dataclass, replace

from tree_rl.training.context import StepContext
from tree_rl.training.last_inference import LastInference
from tree_rl.training.measured_calls import MeasuredCalls
from tree_rl.training.planning.budget import AutoBudget
from tree_rl.training.planning.step_memory import StepMemory
from tree_rl.training.routers.expert_load import ExpertLoad
from tree_rl.training.tree_options import TreeOptions


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class Knowledge:
    """Knowledge of one step. Budget and costs are the same on all ranks."""

    budget: AutoBudget
    """Token budget of one forward."""
    memory_model: StepMemory | None
    """Chooses how a group beyond the budget runs; None: always in partitions within the budget."""
    calls: MeasuredCalls
    """Times of updates, and the cost model fitted to them."""
    log_probs: LastInference
    """Log-probs of the last inference."""
    load: ExpertLoad | None
    """Load of experts; None unless `router_aux_loss_coef` is set."""

    @classmethod
    def of(cls, context: StepContext, options: TreeOptions) -> "Knowledge":
        """Knowledge before the first call."""
        memory, coef, hooks = context.memory, options.router_aux_loss_coef, context.routers
        return cls(
            budget=AutoBudget(num_ranks=context.num_ranks, group=context.data_parallel),
            memory_model=None
            if memory is None
            else StepMemory(
                replace(memory, sequence_ranks=context.sharing_ranks),
                offload=options.offload,
                num_ranks=context.num_ranks,
                sequence_parallel=context.sequence_parallel,
            ),
            calls=MeasuredCalls(context.model_shape, decides=not context.is_deterministic),
            log_probs=LastInference(),
            load=None if coef is None or hooks is None else ExpertLoad(hooks, coef, context),
        )

    def forget(self) -> None:
        """Drop the results of the last inference, because the weights have changed."""
        self.log_probs.forget()
        if self.load is not None:
            self.load.last_inference.forget()
