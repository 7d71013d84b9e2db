"""One engine call of verl: rows into forests, forests into steps, steps in lock-step with the other ranks.

Rows stay verl's; its loss functions, metrics, checkpoints and weight sync follow unchanged.
"""

import logging
import time
from collections.abc import Iterator
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from functools import cached_property, partial
from itertools import chain
from typing import Any

import torch
import torch.distributed
from tensordict import TensorDict
from torch.distributed.tensor import DTensor

from tree_rl.training.fsdp_recovery import CountedCollectives
from tree_rl.verl_plugin.compat import AggregationType, Metric, get_device_id, get_device_name
from tree_rl.verl_plugin.compat import tensordict_utils as tu
from tree_rl.verl_plugin.engine.auto_budget import AutoBudget
from tree_rl.verl_plugin.engine.build import VALUE_MODEL
from tree_rl.verl_plugin.engine.features import refuse_batch_features, refuse_engine_features
from tree_rl.verl_plugin.engine.forward import LossFunction, TreeForwardEngine
from tree_rl.verl_plugin.engine.lock_step import Agreement, agree_on_ops, run_in_step
from tree_rl.verl_plugin.engine.micro_batches import (
    MicroBatch,
    budget_of,
    largest_forward,
    live_tokens,
    plan_micro_batches,
)
from tree_rl.verl_plugin.engine.outputs import collect_outputs, plan_metrics
from tree_rl.verl_plugin.engine.plan_memory import PlanMemory
from tree_rl.verl_plugin.engine.router_replay import COLUMN
from tree_rl.verl_plugin.engine.row_memory import RowMemory
from tree_rl.verl_plugin.engine.rows import RowError, Rows, read_rows
from tree_rl.verl_plugin.engine.self_check import run_self_check
from tree_rl.verl_plugin.engine.state import load_engine_state, save_engine_state
from tree_rl.verl_plugin.engine.steps import Step, make_step
from tree_rl.verl_plugin.options import AUTO, TreeConfig, as_tree_config

logger = logging.getLogger(__name__)


class TreeRunningEngine(TreeForwardEngine):
    """Plans a call, agrees with the other ranks, runs its steps; what a step reads is its subclass's business."""

    def __init__(self, model_config: Any, engine_config: Any, optimizer_config: Any, checkpoint_config: Any) -> None:
        self.tree_config: TreeConfig = as_tree_config(engine_config.get("tree", None))
        refuse_engine_features(model_config, engine_config, is_value=self.stock_model_type == VALUE_MODEL)
        # verl's own model builders know only these two names.
        model_config.model_type = self.stock_model_type
        super().__init__(model_config, engine_config, optimizer_config, checkpoint_config)
        self._self_checked = not self.tree_config.self_check
        self.memory = RowMemory()
        self.plans = PlanMemory()
        self.auto_budget = AutoBudget(self.get_data_parallel_group())
        self.dummy_ops = 0
        self.out_of_memory = 0
        self._live_tokens = 0
        self._largest_forward = 0
        self._check_tokens = 0

    def forward_backward_batch(
        self, data: TensorDict, loss_function: LossFunction | None, forward_only: bool = False
    ) -> dict[str, Any]:
        """verl's seam for training and inference alike: run all rows of a batch, as trees where that pays.

        Args:
            data: rows without padding (nested `input_ids`, `loss_mask`, ...), as verl builds them.
            loss_function: verl's loss over row outputs; may be None when `forward_only`.
            forward_only: no gradients.

        Returns:
            verl's dict of `model_output` (nested, in the order of the rows), `loss` and `metrics`.

        Raises:
            RowError: a row that cannot be trained on, named.
        """
        if self.tree_config.mode == "flat":
            return super().forward_backward_batch(data, loss_function, forward_only)
        refuse_batch_features(data)
        self.begin_routing(data, forward_only)
        # Gradients of an earlier call would be lost with those of a failed one: then an error stands. So it does with
        # replicas of shards, whose all-reduce is not counted.
        is_first = forward_only or all(parameter.grad is None for parameter in self.module.parameters())
        may_repeat = is_first and self.device_mesh.ndim == 1
        result = self._run(data, loss_function, forward_only, may_repeat)
        if result is None:
            if not forward_only:
                self.optimizer_zero_grad()
            result = self._run(data, loss_function, forward_only, may_repeat=False)
            assert result is not None
        return result

    def _run(
        self, data: TensorDict, loss_function: LossFunction | None, forward_only: bool, may_repeat: bool
    ) -> dict[str, Any] | None:
        """The call's result; None if a rank ran out of memory and all of them shall run the call again."""
        started = time.perf_counter()
        rows, micro_batches, steps, agreement = self._plan(data, loss_function, forward_only, may_repeat)
        plan_seconds = time.perf_counter() - started
        self._live_tokens, self._largest_forward = live_tokens(micro_batches), largest_forward(micro_batches)
        self._assign_normalisers(data)
        if not self._self_checked:
            self._self_checked = True
            self.self_check_error = run_self_check(self, data, rows, micro_batches, self._check_tokens)
        if self.balance and not self.balance.prepare(self, data, rows, micro_batches, agreement, forward_only):
            return None
        base_bytes = self._base_bytes(forward_only)
        if not self.follow(agreement, steps, forward_only):
            return None
        if base_bytes is not None:
            self.auto_budget.learn(
                live_tokens=self._live_tokens,
                base_bytes=base_bytes,
                peak_bytes=torch.cuda.max_memory_allocated() + self._missing_moments(),
                total_bytes=torch.cuda.get_device_properties(torch.cuda.current_device()).total_memory,
            )
        if not (forward_only or tu.get_non_tensor_data(data=data, key="return_model_output", default=False)):
            for step in steps:
                step.output.pop("model_output", None)
        outputs = [step.output for step in steps]
        result = collect_outputs(outputs, micro_batches, rows.num_rows, self.get_data_parallel_group())
        result["metrics"] |= plan_metrics(micro_batches, self.get_data_parallel_size())
        result["metrics"] |= {
            "tree/dummy_ops": Metric(AggregationType.SUM, float(self.dummy_ops * self.get_data_parallel_size())),
            "tree/out_of_memory": Metric(AggregationType.MAX, float(self.out_of_memory)),
            "tree/plan_seconds": Metric(AggregationType.MAX, plan_seconds),
            "tree/self_check_error": Metric(AggregationType.MAX, self.self_check_error or 0.0),
        }
        if self.balance is not None and not forward_only:
            result["metrics"] |= self.balance.metrics()
        if forward_only and self.optimizer is not None and not self.is_reference:
            if self.replay is not None and self.replay.records and rows.num_rows:
                rows = self.replay.with_recorded(rows, result["model_output"][COLUMN])
            if "log_probs" in result["model_output"]:
                self.memory.remember(rows, result["model_output"]["log_probs"].cpu().unbind())
            if self.balance is not None:
                self.balance.remember(rows)
        return result

    def follow(self, agreement: Agreement, steps: list[Step], forward_only: bool) -> bool:
        """Run the steps in lock-step; False if a rank ran out of memory and all shall run the call again."""
        work: Iterator[str] = chain.from_iterable(step.work() for step in steps)
        sync_context = partial(self._sync_context, forward_only)
        is_out_of_memory = False
        self.collectives.start()
        with torch.no_grad() if forward_only else nullcontext():
            try:
                self.dummy_ops = run_in_step(agreement.schedule, work, self.idle_step, sync_context)
            except torch.cuda.OutOfMemoryError as error:
                if not agreement.may_repeat or self._live_tokens <= 1:
                    error.add_note(
                        f"lower tree.max_tokens (or set it to auto): {self._live_tokens} unique tokens were alive"
                    )
                    raise
                is_out_of_memory = True
            if is_out_of_memory:
                # Outside the handler, so that the frames of the failed run, and what they hold, are gone.
                steps.clear()
                work = iter(())
                self.collectives.restart()
                torch.cuda.empty_cache()
                run_in_step(agreement.schedule, work, self.idle_step, sync_context)
        if not agreement.may_repeat:
            return True
        tokens = self.auto_budget.shrink_after(is_out_of_memory, self._largest_forward)
        if tokens is None:
            return True
        self.out_of_memory += 1
        logger.warning(
            "CUDA ran out of memory%s; all ranks repeat the step with tree.max_tokens=%d",
            " on this rank" if is_out_of_memory else " on another rank",
            tokens,
        )
        return False

    def _plan(
        self, data: TensorDict, loss_function: LossFunction | None, forward_only: bool, may_repeat: bool
    ) -> tuple[Rows, list[MicroBatch], list[Step], Agreement]:
        """Check the rows, cut them into micro-batches, and agree with all ranks on the ops before anyone computes."""
        failure: RowError | None = None
        micro_batches: list[MicroBatch] = []
        steps: list[Step] = []
        try:
            rows = read_rows(
                data,
                vocab_size=self.vocab_size,
                max_positions=self.max_positions,
                less_rejected=self.tree_config.path_weighting == "token_unique",
            )
            always_trees = self.leaks_when_packed
            if self.replay is not None:
                rows = self.replay.with_routes(data, rows)
                always_trees = always_trees or self.replay.records or self.replay.replays
            budget = budget_of(data, rows, self.tree_config, self.auto_budget)
            self._check_tokens = min(budget.unique_tokens, budget.flat_tokens)
            config = replace(self.tree_config, mode="tree") if always_trees else self.tree_config
            micro_batches = plan_micro_batches(rows, config, budget, self.model_shape, self.plans)
            steps = [make_step(self, batch, data, rows, loss_function, forward_only) for batch in micro_batches]
        except RowError as error:
            failure = error
        ops = "".join(step.ops for step in steps)
        agreement = agree_on_ops(
            ops, is_refused=failure is not None, may_repeat=may_repeat, group=self.get_data_parallel_group()
        )
        if failure is not None:
            raise failure
        if agreement.is_refused:
            raise RuntimeError("another data-parallel rank refused its rows; its own error names the row")
        return rows, micro_batches, steps, agreement

    def _assign_normalisers(self, data: TensorDict) -> None:
        """The row-based normalisers verl's losses read: the same numbers as in stock verl."""
        tokens = data["loss_mask"].values().sum().to(get_device_id())
        torch.distributed.all_reduce(tokens, group=self.get_data_parallel_group())
        tu.assign_non_tensor(data, sp_size=1, batch_num_tokens=tokens.item(), dp_size=self.get_data_parallel_size())

    def _sync_context(self, forward_only: bool, is_last_backward: bool) -> AbstractContextManager[Any]:
        if forward_only:
            return nullcontext()
        return self._gradient_sync_context(is_last_micro_batch=is_last_backward)

    def _base_bytes(self, forward_only: bool) -> int | None:
        """Memory before the first update on a GPU, from which `max_tokens: auto` learns; None for any other call."""
        learns = self.tree_config.max_tokens == AUTO and self.auto_budget.tokens is None and not forward_only
        if not learns or get_device_name() != "cuda":
            return None
        torch.cuda.reset_peak_memory_stats()
        return torch.cuda.memory_allocated() + self._missing_moments()

    def _missing_moments(self) -> int:
        """Bytes of Adam's two moments, which come with the first optimizer step only."""
        return 0 if self.optimizer.state else sum(2 * p.numel() * p.element_size() for p in local_parameters(self))

    @cached_property
    def collectives(self) -> CountedCollectives:
        """FSDP2's collectives, counted so that a rank can catch up after a failure."""
        return CountedCollectives(self.module)

    def forget(self) -> None:
        """What the last inference found out is stale from here on."""
        self.memory.forget()
        if self.balance is not None:
            self.balance.memory.forget()

    def optimizer_step(self) -> float:
        """verl's step, which moves the weights."""
        self.forget()
        return super().optimizer_step()

    def load_checkpoint(
        self, local_path: str, hdfs_path: str | None = None, del_local_after_load: bool = True, **kwargs: Any
    ) -> None:
        """verl's loading, which moves the weights."""
        self.forget()
        super().load_checkpoint(local_path, hdfs_path, del_local_after_load, **kwargs)
        if local_path is not None:
            load_engine_state(self, local_path)

    def save_checkpoint(
        self,
        local_path: str,
        hdfs_path: str | None = None,
        global_step: int = 0,
        max_ckpt_to_keep: int | None = None,
        **kwargs: Any,
    ) -> None:
        """verl's checkpoint, and what the engine has learnt."""
        super().save_checkpoint(local_path, hdfs_path, global_step, max_ckpt_to_keep, **kwargs)
        save_engine_state(self, local_path)


def local_parameters(engine: Any) -> list[torch.Tensor]:
    """This rank's shards of the trained parameters."""
    trained = [p for p in engine.module.parameters() if p.requires_grad]
    return [p.to_local() if isinstance(p, DTensor) else p for p in trained]
