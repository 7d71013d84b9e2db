"""verl's FSDP2 engine with a `TreeStep`: the data stays verl's rows, the tree is only an execution plan.

Every unique token runs once. Log-probs, entropies and values are scattered back to the rows; verl's loss functions,
metrics, checkpoints and weight sync stay unchanged.
"""

import logging
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from functools import partial
from typing import Any

import torch
import torch.distributed
from tensordict import TensorDict
from torch import nn

from tree_rl.models import use_edge_head, use_tree_attention
from tree_rl.models.fused_layers import use_liger_layers
from tree_rl.models.images import reads_images
from tree_rl.models.routers.trace import RouterHooks
from tree_rl.models.sequence_parallel_support import KEY as SEQUENCE_PARALLEL
from tree_rl.models.support import check_dropout, has_absolute_positions, leaks_when_packed
from tree_rl.training.context import StepCall, StepContext
from tree_rl.training.loss.outputs import ENTROPY, LOG_PROBS, VALUES
from tree_rl.training.ranks.recovery import CountedCollectives
from tree_rl.training.step import TreeStep
from tree_rl.training.tree_options import GIVEN_WEIGHTINGS
from tree_rl.tree.forest import RowError
from tree_rl.verl_plugin import compat, options
from tree_rl.verl_plugin.compat import tensordict_utils as tu
from tree_rl.verl_plugin.engine import build, verl_loss
from tree_rl.verl_plugin.engine.flat_entropy import entropy_of_rows
from tree_rl.verl_plugin.engine.outputs_back import as_verl_result
from tree_rl.verl_plugin.engine.pair_loss import PairLoss
from tree_rl.verl_plugin.engine.router_replay import RouterReplay
from tree_rl.verl_plugin.engine.rows_in import read_outputs, read_rows, read_trainer_tokens
from tree_rl.verl_plugin.engine.state import load_engine_state, save_engine_state
from tree_rl.verl_plugin.engine.verl_loss import REUSE_LOG_PROBS, VerlLossFunction
from tree_rl.verl_plugin.refusals.job import refuse_engine, refuse_ranks
from tree_rl.verl_plugin.refusals.refusal import Of
from tree_rl.verl_plugin.refusals.table import refuse_if_unsupported

logger = logging.getLogger(__name__)

DEVICES = ["cpu", "cuda"]
BACKENDS = ["fsdp2", "fsdp"]
"""verl's strategies; an engine refuses `fsdp`, whose flat parameters trees do not support, and names the key."""
FSDP = "fsdp_config"


@compat.EngineRegistry.register(model_type=options.TREE_LANGUAGE_MODEL, backend=BACKENDS, device=DEVICES)
class TreeFSDPEngineWithLMHead(compat.FSDPEngineWithLMHead):
    """Actor, reference policy and SFT: log-probs and entropies of trained edges, each computed once."""

    stock_model_type = "language_model"
    """Model type in verl's builders."""
    is_critic = False
    sequence_parallel_group: torch.distributed.ProcessGroup | None = None
    """Group of ranks that share a forest's tokens; None without `ulysses_sequence_parallel_size`."""

    engine_config: Any
    ulysses_parallel_group: Any
    step: TreeStep
    attention_implementation: str
    _flat_attention: str

    def __init__(self, model_config: Any, engine_config: Any, optimizer_config: Any, checkpoint_config: Any) -> None:
        self.tree_config: options.TreeConfig = options.as_tree_config(engine_config.get("tree", None))
        refuse_engine(model_config, engine_config, is_critic=self.is_critic)
        size = engine_config.get(SEQUENCE_PARALLEL, 1)
        refuse_if_unsupported({SEQUENCE_PARALLEL: size, "config": model_config.hf_config}, FSDP, Of.HEADS)
        # verl's model builders only accept these two names.
        model_config.model_type = self.stock_model_type
        super().__init__(model_config, engine_config, optimizer_config, checkpoint_config)
        self._router_hooks: RouterHooks | None = None
        self.replay: RouterReplay | None = None
        """Records and replays routes; None if `router_replay.mode` is disabled."""
        self._is_reference = False
        self._outputs_of_update: dict[str, torch.Tensor] | None = None

    def initialize(self) -> None:
        """Initialise as verl does, then build the step; raises a ValueError if `tree.attention` cannot run here."""
        super().initialize()
        shape = build.shape_of(self._plain_module, is_critic=self.is_critic)
        self.attention_implementation = build.chosen_attention(
            self._plain_module,
            self.tree_config,
            dtype=self._autocast_dtype,
            shape=shape,
            deterministic=self.engine_config.full_determinism,
        )
        if torch.distributed.get_rank() == 0:
            # Ray shows workers' prints, but not logs of this level.
            print(f"attention: {self.attention_implementation}", flush=True)
        context = StepContext(
            module=self.module,
            device=torch.device(compat.get_device_id()),
            data_parallel=torch.distributed.group.WORLD,
            sequence_parallel=self.sequence_parallel_group,
            model_shape=shape,
            memory=build.memory_model(self._plain_module, shape, dtype=self._autocast_dtype),
            compute_dtype=self._autocast_dtype,
            autocast=nullcontext
            if self._autocast_dtype == torch.float32
            else partial(torch.autocast, device_type=compat.get_device_name(), dtype=self._autocast_dtype),
            loss_scale=(lambda: 1.0) if self.scaler is None else self._loss_scale,
            gradient_sync=lambda is_last: self._gradient_sync_context(is_last_micro_batch=is_last),
            collectives=CountedCollectives(self.module),
            # The all-reduce among replicas of shards is not counted, so such a call cannot be repeated.
            may_repeat=self.device_mesh.ndim == 1,
            pending_bytes=lambda: build.moments_to_come(self.module, self.optimizer),
            routers=self._router_hooks,
            is_deterministic=self.engine_config.full_determinism,
            always_forest=build.runs_as_forests(self._plain_module, self._flat_attention),
        )
        self.step = TreeStep(self.module, self.tree_config, context=context)
        self._read_rows = partial(
            read_rows,
            vocab_size=self._vocab_size,
            max_positions=build.text_settings(self._plain_module).get("max_position_embeddings"),
            first_position=0 if has_absolute_positions(self._plain_module) else None,
            image_config=self._plain_module.config if self._reads_images else None,
        )

    def forward_backward_batch(
        self, data: TensorDict, loss_function: VerlLossFunction | None, forward_only: bool = False
    ) -> dict[str, Any]:
        """Train on or infer all rows of a batch (nested, without padding), as trees where that is faster.

        Returns verl's dict of `model_output` (nested, in the order of the rows), `loss` and `metrics`. Raises a
        RowError that names a row that cannot be trained on.
        """
        is_flat = self.tree_config.mode == "flat"
        reuses = not forward_only and _reuses_log_probs(data)
        if self.tree_config.reuse_log_probs is True and not (forward_only or reuses or self.is_critic):
            refuse_if_unsupported(data, "", Of.UPDATE_WITH_REUSE)
        if not is_flat:
            group = self.get_data_parallel_group()
            context, trains = self.step.context, not forward_only
            loss_function = verl_loss.with_normalisers(loss_function, data, group, context, trains=trains)
        if reuses:
            assert loss_function is not None
            sees_entropy = tu.get_non_tensor_data(data=data, key="calculate_entropy", default=False)
            tu.assign_non_tensor(data, return_model_output=True)
            loss_function = verl_loss.OnPolicyLoss(loss_function, sees_entropy)
        result: dict[str, Any]
        if is_flat:
            result = super().forward_backward_batch(data, loss_function, forward_only)
        else:
            result = self._run_rows(data, loss_function, forward_only)
        if reuses:
            outputs = result["model_output"]
            # Ranks without rows have no outputs.
            self._outputs_of_update = {name: outputs[name].cpu() for name in (LOG_PROBS, ENTROPY) if name in outputs}
        return result

    def take_outputs_of_update(self) -> dict[str, torch.Tensor]:
        """Return and clear `log_probs` and `entropy` (nested, full rows) of the last update with `reuse_log_probs`.

        Empty on a rank without rows. Raises a RuntimeError if there was no such update since the last call.
        """
        found, self._outputs_of_update = self._outputs_of_update, None
        if found is None:
            raise RuntimeError(f"expected an update with {REUSE_LOG_PROBS}=True before its log-probs are asked for")
        return found

    def _run_rows(self, data: TensorDict, loss_function: VerlLossFunction | None, forward_only: bool) -> dict[str, Any]:
        checks = [Of.BATCH_WITH_IMAGES if self._reads_images else Of.BATCH_OF_TEXT]
        if self.replay is None:
            checks.append(Of.BATCH_WITHOUT_REPLAY)
            if not (self.is_critic or self.engine_config.forward_only):
                checks.append(Of.POLICY_WITHOUT_REPLAY)
        refuse_if_unsupported(data, "", *checks)
        # A pass without gradients has no path weights, and needs none.
        is_unweighted = forward_only and self.tree_config.path_weighting in GIVEN_WEIGHTINGS
        records_routes = False
        try:
            rows = self._read_rows(data, path_weighting="verl" if is_unweighted else self.tree_config.path_weighting)
            if self.replay is not None and not self._is_reference:
                rows, records_routes = self.replay.in_rows(data, rows, trains=not forward_only)
        except RowError as error:
            self.step.planner.refuse(error)
        group = self.get_data_parallel_group()
        verl_call = verl_loss.VerlCall(data=data, loss_function=loss_function, group=group, stock_step=self.stock_step)
        # verl's forward would slice rows over ranks that share tokens; without trees, rows of a pair could run apart,
        # and a teacher's candidates need all logits.
        needs_trees = isinstance(loss_function, PairLoss) or rows.candidates_FK is not None
        call = StepCall(
            rows=rows,
            outputs=(VALUES,) if self.is_critic else read_outputs(data),
            trainer_tokens=read_trainer_tokens(data),
            trains=not forward_only,
            loss=None if loss_function is None else verl_call.loss,
            is_separable=verl_loss.is_token_separable(loss_function),
            couples_log_probs_alone=verl_loss.couples_log_probs_alone(loss_function),
            run_rows_flat=None if needs_trees or self.sequence_parallel_group is not None else verl_call.run_flat,
            records_routes=records_routes,
            is_reference=self._is_reference or self.optimizer is None,
        )
        result = self.step.run_call(call)
        if not forward_only:
            build.zero_gradients_of_towers(self._plain_module)
        keeps = forward_only or tu.get_non_tensor_data(data=data, key="return_model_output", default=False)
        return as_verl_result(result, self.step, data["input_ids"].offsets(), keeps_outputs=keeps)

    def prepare_model_outputs(
        self, output: Any, output_args: dict[str, Any], micro_batch: TensorDict, logits_processor_func: Any
    ) -> dict[str, torch.Tensor]:
        """verl's outputs of rows without a tree, plus the entropy in an update that reuses its log-probs."""
        found: dict[str, torch.Tensor] = super().prepare_model_outputs(
            output, output_args, micro_batch, logits_processor_func
        )
        if _reuses_log_probs(micro_batch) and ENTROPY not in found:
            found[ENTROPY] = entropy_of_rows(output.logits, output_args, micro_batch["input_ids"].offsets())
        return found

    def stock_step(
        self, selected: TensorDict, loss_function: VerlLossFunction | None, forward_only: bool
    ) -> tuple[torch.Tensor, dict[str, Any]]:
        """Run rows through verl's forward, packed, without a tree."""
        result: tuple[torch.Tensor, dict[str, Any]] = super().forward_step(selected, loss_function, forward_only)
        return result

    def _loss_scale(self) -> float:
        return float(self.scaler.scale(torch.ones((), device=compat.get_device_name())))

    @contextmanager
    def _gradient_sync_context(self, *, is_last_micro_batch: bool) -> Iterator[None]:
        with super()._gradient_sync_context(is_last_micro_batch=is_last_micro_batch):
            if self.engine_config.use_no_sync_for_gradient_accumulation and not is_last_micro_batch:
                build.reduce_what_never_ran(self.module)
            yield

    def _init_device_mesh(self) -> None:
        """Build verl's meshes, but hide the Ulysses group from its attention patches: our step exchanges the heads."""
        refuse_ranks(self.engine_config, FSDP, torch.distributed.get_world_size())
        super()._init_device_mesh()
        self.sequence_parallel_group, self.ulysses_parallel_group = self.ulysses_parallel_group, None

    def _build_module(self) -> nn.Module:
        build.choose_flat_attention(self.model_config.hf_config)
        fused = {"device": torch.device(compat.get_device_name()), "deterministic": self.engine_config.full_determinism}
        uses_liger = build.uses_liger(self.model_config, **fused)
        # Not verl's Ulysses either: it needs divisible key-value heads and slices the inputs of some models.
        stock = {"model_config": build.without_liger(self.model_config), "ulysses_sequence_parallel_size": 1}
        with build.replaced(self, **stock):
            module: Any = self._stock_module()
        if uses_liger:
            use_liger_layers(module, **fused)
        refuse_if_unsupported({"leaks": leaks_when_packed(module), "tree": self.tree_config}, FSDP, Of.PACKING)
        self._plain_module = module
        # Read now, because adapters wrap the embedding and not all of them expose its size.
        self._vocab_size = module.get_input_embeddings().weight.shape[0]
        self._reads_images = reads_images(module)
        # Raises before sharding if trees cannot run this model exactly.
        self._flat_attention = use_tree_attention(
            module, impl=self.tree_config.attention, deterministic=self.engine_config.full_determinism
        )
        logger.info("tree attention over %s on %s", self._flat_attention, type(module).__name__)
        mode = options.replay_mode(self.engine_config)
        if self.tree_config.router_aux_loss_coef is not None or mode != options.DISABLED:
            self._router_hooks = RouterHooks(module)
        if self._router_hooks is not None and mode != options.DISABLED:
            # Raises before sharding if the routers cannot repeat routes.
            self.replay = RouterReplay(self._router_hooks, mode)
        return module

    def _stock_module(self) -> nn.Module:
        built: nn.Module = super()._build_module()
        return built

    def _build_fsdp_module(self, module: nn.Module) -> nn.Module:
        """Shard the module, and let its head compute edges. Adapters, which may wrap the head, are already attached."""
        check_dropout(module)
        if self._is_lora:
            refuse_if_unsupported(self._plain_module, "model", Of.ADAPTERS)
        if not self.is_critic:
            reason = use_edge_head(self._plain_module)
            logger.info("the head computes %s", "log-probs of edges" if reason is None else f"logits, for {reason}")
        config = build.without_pinned_offload(self.engine_config)
        if config is not self.engine_config:
            self._is_offload_param = self._is_offload_optimizer = False
        with build.replaced(self, engine_config=build.without_nested_shards(config, self._plain_module)):
            sharded: nn.Module = super()._build_fsdp_module(module)
            return sharded

    def get_per_tensor_param(
        self, layered_summon: bool = False, base_sync_done: bool = False, **kwargs: Any
    ) -> tuple[Iterator[tuple[str, torch.Tensor]], Any]:
        """verl's weights for the rollout, named as in a checkpoint: a tied weight once.

        From 0.29 on vLLM refuses a tied weight's second name where adapters wrap the first, and verl waits for ever.
        """
        weights, adapter = super().get_per_tensor_param(layered_summon, base_sync_done, **kwargs)
        tied = self._plain_module.all_tied_weights_keys
        return ((name, weight) for name, weight in weights if name not in tied), adapter

    @contextmanager
    def disable_adapter(self) -> Iterator[None]:
        """verl's reference policy inside the actor: another model, so routes and log-probs are not shared with it.

        Trained parameters stay marked as such, which PEFT changes: FSDP2 chooses dtypes of gradients in its first
        forward, by the parameters that are trained then. Trees may leave the pass for old log-probs out, so that
        forward can be this one.
        """
        trained = [parameter for parameter in self.module.parameters() if parameter.requires_grad]
        self._is_reference = True
        try:
            with super().disable_adapter():
                for parameter in trained:
                    parameter.requires_grad_(True)
                yield
        finally:
            self._is_reference = False
        self.forget()

    def forget(self) -> None:
        """Drop results of the last inference, because the weights have changed."""
        self.step.forget()

    def optimizer_step(self) -> float:
        self.forget()
        return super().optimizer_step()

    def load_checkpoint(
        self, local_path: str, hdfs_path: str | None = None, del_local_after_load: bool = True, **kwargs: Any
    ) -> None:
        self.forget()
        super().load_checkpoint(local_path, hdfs_path, del_local_after_load, **kwargs)
        if local_path is not None:
            load_engine_state(local_path, self.step, self.scaler)

    def save_checkpoint(
        self,
        local_path: str,
        hdfs_path: str | None = None,
        global_step: int = 0,
        max_ckpt_to_keep: int | None = None,
        **kwargs: Any,
    ) -> None:
        super().save_checkpoint(local_path, hdfs_path, global_step, max_ckpt_to_keep, **kwargs)
        save_engine_state(local_path, self.step, self.scaler)


def _reuses_log_probs(data: TensorDict) -> bool:
    return bool(tu.get_non_tensor_data(data=data, key=REUSE_LOG_PROBS, default=False))


@compat.EngineRegistry.register(model_type=options.TREE_VALUE_MODEL, backend=BACKENDS, device=DEVICES)
class TreeFSDPEngineWithValueHead(TreeFSDPEngineWithLMHead, compat.FSDPEngineWithValueHead):
    """Critic: the value of every unique token, computed once."""

    stock_model_type = "value_model"
    is_critic = True

    def _stock_module(self) -> nn.Module:
        return build.build_value_module(self.model_config, self.engine_config, self.device_mesh)
