"""What earlier calls of a step have taught: the planner reads it, the learner adds to it."""

from dataclasses import dataclass, replace

from tree_rl.training.context import StepContext
from tree_rl.training.measured_calls import MeasuredCalls
from tree_rl.training.planning.budget import AutoBudget
from tree_rl.training.planning.step_memory import StepMemory
from tree_rl.training.routers.expert_load import ExpertLoad
from tree_rl.training.row_memory import RowMemory
from tree_rl.training.tree_options import TreeOptions


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class Knowledge:
    """One step's; all ranks know the same of budget and costs."""

    budget: AutoBudget
    """Tokens of one forward."""
    memory: StepMemory | None
    """Chooses how a group beyond the budget runs; None: in partitions of the budget's size."""
    calls: MeasuredCalls
    """How long updates took, and so what work costs."""
    log_probs: RowMemory
    """Log-probs that the last inference found."""
    load: ExpertLoad | None
    """Load of experts; None where nobody asks for it."""

    @classmethod
    def of(cls, context: StepContext, options: TreeOptions) -> "Knowledge":
        """Nothing but what the model's shape tells."""
        memory, coef, hooks = context.memory, options.router_aux_loss_coef, context.routers
        return cls(
            budget=AutoBudget(num_ranks=context.num_ranks, group=context.data_parallel),
            memory=None
            if memory is None
            else StepMemory(
                replace(memory, sequence_ranks=context.sharing_ranks),
                offload=options.offload,
                num_ranks=context.num_ranks,
                sequence_parallel=context.sequence_parallel,
            ),
            calls=MeasuredCalls(context.model_shape, decides=not context.is_deterministic),
            log_probs=RowMemory(),
            load=None if coef is None or hooks is None else ExpertLoad(hooks, coef, context),
        )

    def forget(self) -> None:
        """The weights have moved: what the last inference found out is stale."""
        self.log_probs.forget()
        if self.load is not None:
            self.load.memory.forget()
