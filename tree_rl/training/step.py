"""Forward and backward of a batch over trees: plan -> run -> learn; the caller steps the optimizer.

Each unique token runs once. Its outputs are scattered to the rows and go into the rows' unchanged loss, so gradients
equal those of the rows run separately (paper, section 3).
"""

from dataclasses import replace

from torch import nn
from torch.distributed.fsdp import FullyShardedDataParallel
from torch.nn.parallel import DistributedDataParallel

from tree_rl.models.routers.trace import RouterHooks
from tree_rl.models.support import check_dropout
from tree_rl.training.context import Group, StepCall, StepContext
from tree_rl.training.hand_overs import PlanRun, StepPlan, StepResult
from tree_rl.training.learn import Learner
from tree_rl.training.loss.outputs import LOG_PROBS, Loss, Wanted
from tree_rl.training.planner import Planner
from tree_rl.training.repeat import settle
from tree_rl.training.routers.expert_load import ExpertLoad
from tree_rl.training.rows import Rows
from tree_rl.training.run import Runner
from tree_rl.training.self_check import SelfCheck
from tree_rl.training.tree_options import AUTO, TreeOptions

ONE_FORWARD_A_BACKWARD = (DistributedDataParallel, FullyShardedDataParallel)
"""Wrappers that expect a backward after each forward, while partitions keep several forwards alive."""


class TreeStep:
    """Runs a model over rows as trees, for an update (`run`) or without gradients (`infer`).

    Between calls it keeps log-probs of rows (until `forget`), partition plans and the learnt token budget.
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
            group: all ranks, which run in lock-step; None is the default group, if there is one.
            context: for another trainer than a plain torch loop; replaces `model` and `group`.

        Raises:
            UnsupportedModelError: the model draws dropout masks, or has no experts for `router_aux_loss_coef`.
            ValueError: `router_aux_loss_coef` with a context without `routers`, or a wrapper in which partitions would
                hang or fail.
        """
        self.options = TreeOptions() if options is None else options
        if context is None:
            context = StepContext.of(model, group)
            if self.options.router_aux_loss_coef is not None:
                context = replace(context, routers=RouterHooks(model))
        elif self.options.router_aux_loss_coef is not None and context.routers is None:
            raise ValueError("router_aux_loss_coef needs StepContext.routers: expected RouterHooks, received None")
        if isinstance(context.module, ONE_FORWARD_A_BACKWARD):
            raise ValueError(
                f"{type(context.module).__name__} expects a backward after each forward, while partitions keep several "
                "forwards alive: give TreeStep the module without it and average gradients over the ranks before the "
                "optimizer's step, or shard it with fully_shard"
            )
        self.context = context
        check_dropout(context.module)
        self.learner = Learner(self.context, self.options)
        self.planner = Planner(self.context, self.learner)
        self.runner = Runner(self.context, self.learner.load)
        self.self_check = SelfCheck(self.context)
        self.dummy_ops = 0
        """One-token forwards of the last call that kept this rank in lock-step."""
        self.out_of_memory = 0
        """Number of calls that ran again because a rank ran out of memory."""

    def run(
        self,
        rows: Rows,
        loss: Loss,
        *,
        outputs: Wanted = (LOG_PROBS,),
        is_separable: bool = False,
        records_routes: bool = False,
    ) -> StepResult:
        """Forward and backward of all rows; gradients add up in the parameters' `grad`.

        Args:
            rows: the rows of this rank, possibly none.
            loss: takes outputs [f] of some rows (f flat tokens) and these rows' indices; returns a scalar and metrics.
                Called once per micro-batch, and in a forest that runs in partitions also once per partition.
            outputs: names of the outputs that the loss reads; `sum_pi_squared` has no gradient.
            is_separable: True if dL/dlog-prob of a token depends on no other log-prob; partitions then need no extra
                pass.
            records_routes: True if the result must contain which experts ran.

        Raises:
            RowError: a row cannot be trained on; the message names it.
            RuntimeError: another rank refused its rows.
            TreeMismatchError: the self-check, before the first batch, found that trees do not equal rows.
            ValueError: the options say `mode: flat`, or routes are replayed or recorded without `StepContext.routers`.
        """
        call = StepCall(
            rows=rows, loss=loss, trains=True, outputs=outputs, is_separable=is_separable, records_routes=records_routes
        )
        return self.run_call(call)

    def infer(
        self, rows: Rows, loss: Loss | None = None, *, outputs: Wanted = (LOG_PROBS,), records_routes: bool = False
    ) -> StepResult:
        """Outputs of all rows without gradients, remembered for the next `run`; arguments and errors as in `run`."""
        call = StepCall(rows=rows, loss=loss, trains=False, outputs=outputs, records_routes=records_routes)
        return self.run_call(call)

    def run_call(self, call: StepCall, *, is_repeat: bool = False) -> StepResult:
        """`run` or `infer` with a trainer's options; `is_repeat` after it ran out of memory. Errors as in `run`."""
        learner, options = self.learner, self.options
        if options.mode == "flat":
            raise ValueError("tree.mode=flat needs a trainer that runs rows without a tree: expected auto or tree")
        if self.context.routers is None and (call.records_routes or call.rows.routes_FLK is not None):
            raise ValueError(
                "routes are recorded and replayed by StepContext.routers: expected RouterHooks, received None"
            )
        plan = self.planner.plan(call, options, is_repeat=is_repeat)
        if options.self_check and call.is_reference not in self.self_check.checked:
            self.self_check.run(plan)
        if learner.load is not None and not self._charge(learner.load, plan):
            return self._again(call)
        learns_budget = options.max_tokens == AUTO and learner.budget.tokens is None and call.trains
        learns_budget = learns_budget and self.context.device.type == "cuda"
        base_bytes = learner.budget.bytes_before_update() if learns_budget else 0
        ran = self._run(plan)
        if ran is None:
            return self._again(call)
        self.dummy_ops = ran.dummy_ops
        if learns_budget:
            learner.budget.learn(plan.batches, base_bytes)
        return learner.finish(plan, ran)

    def forget(self) -> None:
        """Drop the results of the last inference; call it when the weights have changed."""
        self.learner.log_probs.forget()
        if self.learner.load is not None:
            self.learner.load.last_inference.forget()

    def _run(self, plan: StepPlan) -> PlanRun | None:
        """Run a plan; None if memory ran out on any rank and all have taken a smaller budget."""
        ran = self.runner.run(plan)
        if ran is None or (plan.may_repeat and self.context.num_ranks > 1):
            ran = settle(self.context, self.learner.budget, self.runner, plan, ran)
        return ran

    def _charge(self, load: ExpertLoad, plan: StepPlan) -> bool:
        """Weight the auxiliary loss of this call; False if memory ran out in the extra pass that counts the load."""
        load.begin()
        if plan.call.trains:
            if load.agree_to_count(plan.call.rows) and self._run(self.planner.counting_plan(plan)) is None:
                return False
            load.charge(plan.call.rows)
        return True

    def _again(self, call: StepCall) -> StepResult:
        """Run a call again, after all ranks have taken a smaller budget."""
        self.out_of_memory += 1
        if call.trains:
            self.context.module.zero_grad()
        return self.run_call(call, is_repeat=True)
