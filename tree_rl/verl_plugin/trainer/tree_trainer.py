"""verl's V1 trainer loop on trees: whole groups, one outcome per session, exact advantages, tree metrics."""

import functools
import math
import time
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np
import ray
import torch
from hydra.utils import instantiate
from omegaconf import DictConfig
from verl.protocol import DataProto

from tree_rl.cost.balance.batch import lay_out_groups, mini_batch_count, number_groups, paths_of_groups
from tree_rl.cost.cost_model import CostModel, ModelShape
from tree_rl.credit import estimator_named
from tree_rl.verl_plugin import compat, path_weights
from tree_rl.verl_plugin.agent_loops.prompt_forests import WEIGHS_CALLS
from tree_rl.verl_plugin.compat import KVBatchMeta
from tree_rl.verl_plugin.compat import transfer_queue as tq
from tree_rl.verl_plugin.engine.verl_loss import REUSE_LOG_PROBS
from tree_rl.verl_plugin.plugin_presence import require_plugin_everywhere
from tree_rl.verl_plugin.refusals.conditions import NEEDS_SUM_PI_SQUARED
from tree_rl.verl_plugin.refusals.job import refuse_cluster
from tree_rl.verl_plugin.resume.resumable_trainer import ResumableTrainer
from tree_rl.verl_plugin.resume.row_names import uid_of_row
from tree_rl.verl_plugin.trainer import queue_rows, step_metrics, workers
from tree_rl.verl_plugin.trainer.adapter_check import AdapterCheck
from tree_rl.verl_plugin.trainer.advantages import Estimation, session_advantages, session_scores
from tree_rl.verl_plugin.trainer.estimator_names import LONGEST_PATH, verls_estimator
from tree_rl.verl_plugin.trainer.old_log_probs import LogProbReuse
from tree_rl.verl_plugin.trainer.prepared_config import prepare_config
from tree_rl.verl_plugin.trainer.sessions import Sessions, trained_token_weights
from tree_rl.verl_plugin.trainer.tree_estimators import credit_trees, longest_paths, tree_advantages

POLL_SECONDS = 0.1
"""Time between two polls for finished groups. verl polls every two seconds, which costs a second per step."""
ADVANTAGE_FIELDS = ["uid", "response_mask", "rm_scores", "rollout_log_probs", "old_log_probs", "ref_log_prob", "values"]
"""Columns to read if they exist; old log-probs are left out if the update computes them."""


class TreeTrainerMixin(ResumableTrainer):
    """Trains on trees; a mix-in that comes before one of verl's V1 trainers among the base classes."""

    actor_worker: type = workers.TreeActorRolloutRefWorker
    """Class of the workers for actor, reference policy and the trainer's side of the rollout."""
    _reuses_log_probs = False
    """True if the current update computes the old log-probs itself."""
    _reports_later = False
    """True if `_compute_metrics` reports the update's log-probs, so that the next rollout does not wait for it."""
    _with_advantages: KVBatchMeta | None = None
    """The batch whose advantages were computed during the reference's pass."""
    _has_updated = False
    _fitted_cost: CostModel | None = None
    """Cost model fitted by the last update's engines; None means the one of the model's shape."""

    def __init__(self, config: DictConfig) -> None:
        prepare_config(config)
        self._reuse = LogProbReuse.of(config)
        self._adapter_check = AdapterCheck.of(config)
        self._updates: list[dict[str, Any]] = []
        """Metrics of each update of the step."""
        super().__init__(config)

    def _init_resource_pool_mgr(self) -> None:
        if ray.is_initialized():
            refuse_cluster(self.config.trainer, ray.nodes())
        super()._init_resource_pool_mgr()
        for role in self.role_worker_mapping:
            worker = workers.TreeTrainingWorker if role == compat.Role.Critic else self.actor_worker
            self.role_worker_mapping[role] = ray.remote(worker)

    def _build_replay_buffer(self) -> compat.ReplayBuffer:
        """verl's buffer, polled more often; a custom sampler keeps its interval."""
        buffer = super()._build_replay_buffer()
        if type(buffer) in (compat.ReplayBuffer, compat.ReplayBufferAsync):
            buffer.poll_interval = POLL_SECONDS
        return buffer

    def fit(self, agent_loop_manager: Any) -> None:
        """Check that every worker of the job has the plugin, then train as verl does."""
        require_plugin_everywhere(self.get_reward_handles())
        super().fit(agent_loop_manager)

    def _step_once(self, metrics: dict[str, Any], timing_raw: dict[str, float], sample_batch_size: int) -> KVBatchMeta:
        batch = super()._step_once(metrics, timing_raw, sample_batch_size)
        self._updates.append(metrics)
        return batch

    @functools.cached_property
    def model_shape(self) -> ModelShape:
        model = instantiate(self.config.actor_rollout_ref.model, load_tokenizer=False, _convert_="partial")
        return ModelShape.from_config(model.hf_config.get_text_config().to_dict())

    def _balance_batch(
        self,
        batch: KVBatchMeta,
        metrics: dict[str, Any],
        logging_prefix: str = "global_seqlen",
        keep_minibatch: bool = False,
    ) -> KVBatchMeta:
        """Assign groups to mini-batches and rows to ranks, and pad every cell to the same number of rows."""
        batch = self._keep_trained_paths(batch, metrics)
        num_ranks = workers.ranks_with_rows(self.actor_rollout_wg, "actor")
        group_of_row = number_groups([uid_of_row(key) for key in batch.keys])
        self._row_tokens = queue_rows.fetch_row_tokens(batch)
        tokens = [self._row_tokens[key] for key in batch.keys]
        paths = paths_of_groups(group_of_row, tokens, self._fitted_cost or self.model_shape.cost)
        actor_steps = mini_batch_count(len(paths), self.config.actor_rollout_ref.actor.ppo_mini_batch_size)
        critic_groups = self.config.critic.ppo_mini_batch_size if self.use_critic else len(paths)
        self._steps = actor_steps, mini_batch_count(len(paths), critic_groups)
        layout = lay_out_groups(
            group_of_row,
            paths,
            num_ranks=num_ranks,
            num_cells=math.lcm(*self._steps),
            multiple_of=self._reference_ranks(),
        )
        metrics.update(step_metrics.overlap_metrics(paths, Sessions.from_keys(batch.keys)))
        metrics.update(step_metrics.balance_metrics(layout))
        # A step trains the weights of the previous step.
        metrics.update(step_metrics.staleness_metrics(batch.tags, group_of_row, trainer_version=self.global_steps - 1))
        metrics.update(step_metrics.branching_metrics(batch.tags, group_of_row))
        batch = compat.upsample_batch_to_divisible_size(batch, len(layout.order), self.tokenizer.eos_token_id)
        lengths = [tag["seq_len"] for tag in batch.tags]
        partitions = layout.order.reshape(num_ranks, -1).tolist()
        metrics.update(compat.log_seqlen_unbalance(lengths, partitions, prefix=logging_prefix))
        batch.reorder(layout.order.tolist())
        return batch

    def _reference_ranks(self) -> int:
        """Number of equal shares of a batch that a separate reference policy needs; 1 without one."""
        has_its_own = self.use_reference_policy and not self.ref_in_actor
        return workers.ranks_with_rows(self.ref_policy_wg, "ref") if has_its_own else 1

    def _keep_trained_paths(self, batch: KVBatchMeta, metrics: dict[str, Any]) -> KVBatchMeta:
        """The rows to train: all, or the longest of each session; removes the others from verl's queue."""
        if self.config.algorithm.adv_estimator != LONGEST_PATH:
            return batch
        kept = longest_paths(Sessions.from_keys(batch.keys), [tag["seq_len"] for tag in batch.tags])
        dropped = sorted(set(range(len(batch.keys))) - set(kept))
        metrics["tree/untrained_rows"] = len(dropped)
        metrics["tree/untrained_row_tokens"] = sum(batch.tags[row]["seq_len"] for row in dropped)
        if dropped:
            tq.kv_clear(keys=[batch.keys[row] for row in dropped], partition_id=batch.partition_id)
        return batch.select_keys([batch.keys[row] for row in kept])

    def _compute_old_log_prob(self, batch: KVBatchMeta, metrics: dict[str, Any]) -> KVBatchMeta:
        """Run verl's pass, unless the update will compute the same log-probs."""
        trains = self.config.trainer.critic_warmup <= self.global_steps
        epochs = self.config.actor_rollout_ref.actor.ppo_epochs
        self._reuses_log_probs = self._reuse.serves(
            self._steps[0] * epochs if trains else 0, needs_earlier_weights=self.local_trigger_step > 0
        )
        metrics["tree/reused_log_probs"] = float(self._reuses_log_probs)
        if self._reuses_log_probs:
            if self.parameter_sync_step > 1:
                # As verl's pass does, because later updates of the step need these weights.
                self.actor_rollout_wg.save_model_to_cpu(0)
            return batch
        batch.extra_info["calculate_sum_pi_squared"] = self.config.algorithm.adv_estimator in NEEDS_SUM_PI_SQUARED
        return super()._compute_old_log_prob(queue_rows.with_engine_fields(batch), metrics)

    def _compute_ref_log_prob(self, batch: KVBatchMeta, metrics: dict[str, Any]) -> KVBatchMeta:
        """Run the reference's pass, and find the advantages meanwhile if they read nothing of it or of a critic."""
        reads_passes = self.use_critic or self.config.algorithm.use_kl_in_reward
        with ThreadPoolExecutor(1) as beside:
            advantages = None if reads_passes else beside.submit(self._find_advantages, batch, metrics)
            self._run_reference(batch)
            self._with_advantages = None if advantages is None else advantages.result()
        return batch

    def _run_reference(self, batch: KVBatchMeta) -> None:
        """verl's pass, but workers write `ref_log_prob`; in verl the trainer reads, cuts and rewrites every row."""
        # A copy, because a critic's pass over the same batch must not see `WITHOUT_ADAPTER`.
        asked = queue_rows.log_prob_request(batch, self.config.actor_rollout_ref.rollout.temperature)
        if self.ref_in_actor:
            asked.extra_info[workers.WITHOUT_ADAPTER] = True
            self.actor_rollout_wg.compute_log_prob(asked)
        else:
            self.ref_policy_wg.compute_ref_log_prob(asked)

    def _compute_values(self, batch: KVBatchMeta, metrics: dict[str, Any]) -> KVBatchMeta:
        return super()._compute_values(queue_rows.with_engine_fields(batch), metrics)

    def _compute_advantage(self, batch: KVBatchMeta, metrics: dict[str, Any]) -> KVBatchMeta:
        """The advantages, unless the reference's pass has found them."""
        found, self._with_advantages = self._with_advantages, None
        return self._find_advantages(batch, metrics) if found is None else found

    def _find_advantages(self, batch: KVBatchMeta, metrics: dict[str, Any]) -> KVBatchMeta:
        """Run verl's steps (KL in the reward, rollout correction, estimator) on real rows, each session once."""
        real = queue_rows.real_rows(batch)
        keys = [batch.keys[row] for row in real]
        estimator = verls_estimator(str(self.config.algorithm.adv_estimator))
        credit, custom = estimator_named(estimator), path_weights.custom_weights_name(self.config)
        with_extras = estimator == "gdpo" or credit is not None or custom is not None
        data, nested_mask, extras = self._fetch_for_advantage(
            keys, batch.partition_id, estimator, with_extras=with_extras
        )
        fields = ["advantages", "returns"]
        if self.config.algorithm.use_kl_in_reward:
            penalty = self.config.algorithm.kl_penalty
            data, kl_metrics = compat.apply_kl_penalty(data, kl_ctrl=self.kl_ctrl_in_reward, kl_penalty=penalty)
            metrics.update(kl_metrics)
            fields.append("token_level_rewards")
        else:
            data.batch["token_level_rewards"] = data.batch["token_level_scores"]
        correction = self._correction_of(data)
        if correction is not None and not self._reuses_log_probs:
            data, correction_metrics = compat.compute_rollout_correction_and_add_to_batch(data, correction)
            metrics.update(correction_metrics)
            fields += ["response_mask"] + (["rollout_is_weights"] if "rollout_is_weights" in data.batch else [])

        sessions = Sessions.from_keys(keys)
        outcome_S = data.batch["token_level_scores"][sessions.final_rows].sum(dim=-1)
        metrics[step_metrics.SCORE] = outcome_S.mean().item()
        metrics["tree/session_score/max"] = outcome_S.max().item()
        lengths = np.array([len(row) for row in nested_mask.unbind()])
        tokens = [self._row_tokens[key] for key in keys]

        @functools.cache
        def token_weights() -> torch.Tensor:
            return trained_token_weights(sessions, tokens, data.batch["response_mask"], lengths)

        trees: list[path_weights.PromptTree] = []
        if credit is not None or (custom is not None and "." in custom):
            penalised = token_weights() if self.config.algorithm.use_kl_in_reward else None
            outcome_S = session_scores(data, sessions, penalised).double()
            trees = credit_trees(data, sessions, outcome_S, nested_mask, row_tokens=tokens, extras=extras)
        if credit is not None:
            options = self.config.algorithm.get("credit", None) or {}
            data = tree_advantages(data, trees, credit, options, response_lengths=lengths, token_weights=token_weights)
        else:
            num_repeat = self.config.actor_rollout_ref.rollout.n
            estimation = Estimation(estimator=estimator, algorithm=self.config.algorithm, num_repeat=num_repeat)
            data = session_advantages(data, sessions, estimation, token_weights)
        if any(batch.tags[row].get(WEIGHS_CALLS, False) for row in real):
            weights_BT = queue_rows.fetch_call_weights(keys, batch.partition_id, data.batch["response_mask"])
            data.batch["advantages"] = data.batch["advantages"] * weights_BT
        columns = {field: compat.response_to_nested(data.batch[field], nested_mask) for field in fields}
        own = None if custom is None else path_weights.custom_weights(custom, lengths.tolist(), extras, trees)
        columns |= self._path_weights(keys, batch.partition_id, data.batch["response_mask"], own)
        return queue_rows.put_with_padding(batch, real, columns)

    def _path_weights(
        self, keys: list[str], partition_id: str, response_mask_BT: torch.Tensor, custom: list[np.ndarray] | None
    ) -> dict[str, torch.Tensor]:
        """The columns of `tree.path_weighting`, which depend on a group's rows on all ranks."""
        weightings = path_weights.wanted_weightings(self.config)
        if not weightings:
            return {}
        loss_mask = tq.kv_batch_get(keys=keys, partition_id=partition_id, select_fields=["loss_mask"])["loss_mask"]
        kept_BT = response_mask_BT.cpu() != 0
        trained = [
            (mask != 0).logical_and(kept_BT[row, : len(mask)]).numpy() for row, mask in enumerate(loss_mask.unbind())
        ]
        return path_weights.path_weight_columns(
            weightings,
            number_groups([uid_of_row(key) for key in keys]),
            [self._row_tokens[key] for key in keys],
            trained,
            session_of_row=Sessions.from_keys(keys).session_of_row,
            custom=custom,
        )

    def _fetch_for_advantage(
        self, keys: list[str], partition_id: str, estimator: str, *, with_extras: bool
    ) -> tuple[DataProto, torch.Tensor, list[dict[str, Any]]]:
        """The columns of the real rows, padded, verl's nested response mask, and each row's `extra_fields`."""
        fields = [name for name in ADVANTAGE_FIELDS if not (name == "old_log_probs" and self._reuses_log_probs)]
        fields += ["extra_fields"] if with_extras else []
        fields += ["sum_pi_squared"] if estimator in NEEDS_SUM_PI_SQUARED else []
        columns = tq.kv_batch_get(keys=keys, partition_id=partition_id, select_fields=fields)
        nested_mask = columns["response_mask"]
        non_tensors = {"uid": np.array(columns.pop("uid").tolist(), dtype=object)}
        extras = columns.pop("extra_fields").tolist() if "extra_fields" in columns else [{}] * len(keys)
        if estimator == "gdpo":
            non_tensors |= queue_rows.reward_components(extras, self.config.algorithm, keys)
        if "sum_pi_squared" in columns:
            columns["sum_pi_squared"] = compat.response_from_nested(columns["sum_pi_squared"], nested_mask)
        data = DataProto(batch=columns.to_padded_tensor(), non_tensor_batch=non_tensors)
        data.batch["token_level_scores"] = data.batch["rm_scores"]
        return data, nested_mask, extras

    def _update_critic(self, batch: KVBatchMeta, metrics: dict[str, Any]) -> KVBatchMeta:
        batch.extra_info["num_mini_batch"] = self._steps[1]
        batch = super()._update_critic(queue_rows.with_engine_fields(batch, trains=True), metrics)
        metrics.update(step_metrics.update_metrics(metrics, "critic"))
        return batch

    def _update_actor(self, batch: KVBatchMeta, metrics: dict[str, Any]) -> KVBatchMeta:
        batch.extra_info["num_mini_batch"] = self._steps[0]
        batch.extra_info[REUSE_LOG_PROBS] = self._reuses_log_probs
        checks_adapter = self._adapter_check.begin_update(self.global_steps - 1)
        adapted = None
        if checks_adapter and self._bypasses_pass():
            temperature = self.config.actor_rollout_ref.rollout.temperature
            adapted = queue_rows.log_probs_of_pass(self.actor_rollout_wg, batch, temperature)
        batch = super()._update_actor(queue_rows.with_engine_fields(batch, trains=True), metrics)
        # verl averages the metrics of several updates before `_compute_metrics`, and the check reads old log-probs.
        self._reports_later = self._reuses_log_probs and self.parameter_sync_step == 1 and not checks_adapter
        if self._reuses_log_probs and not self._reports_later:
            self._report_log_probs_of_update(batch, metrics)
        if checks_adapter:
            if self._reuses_log_probs:
                adapted = queue_rows.fetch_response_log_probs(batch)
            self._check_adapter(batch, metrics, adapted)
        self._fitted_cost = step_metrics.fitted_cost(metrics) or self._fitted_cost
        metrics.update(step_metrics.update_metrics(metrics, "actor"))
        if step_metrics.SCORE in metrics:
            metrics.update(step_metrics.reward_rates(metrics))
        group = self.actor_rollout_wg
        ranks = workers.ranks_with_rows(group, "actor")
        print(step_metrics.explained_layout(metrics, ranks=ranks, sharing=group.world_size // ranks), flush=True)
        if not self._has_updated and "tree/por" in metrics:
            print(step_metrics.first_batch(metrics), flush=True)
        self._has_updated = True
        return batch

    def _report_log_probs_of_update(self, batch: KVBatchMeta, metrics: dict[str, Any]) -> None:
        """Add the metrics of verl's pass, from the log-probs of the update.

        verl takes them over whole responses. Trained tokens alone, a few per cent of a padded batch of agents' rows,
        give the same in a fraction of the time, for which a trainer with rollouts elsewhere would wait.
        """
        asked = KVBatchMeta(
            keys=batch.keys,
            tags=batch.tags,
            partition_id=batch.partition_id,
            # The workers already have the rows; fetching them again would be as slow as for a pass.
            fields=["response_mask"],
            extra_info={workers.OF_UPDATE: True},
        )
        self.actor_rollout_wg.compute_log_prob(asked)
        keys = [batch.keys[row] for row in queue_rows.real_rows(batch)]
        data, longest = queue_rows.fetch_trained_log_probs(keys, batch.partition_id)
        actor = self.config.actor_rollout_ref.actor
        metrics["actor/entropy"] = compat.agg_loss(
            loss_mat=data.batch["entropy"],
            loss_mask=data.batch["response_mask"],
            loss_agg_mode=actor.loss_agg_mode,
            loss_scale_factor=actor.loss_scale_factor or longest,
        ).item()
        if "rollout_log_probs" in data.batch:
            metrics.update(compat.calculate_debug_metrics(data))
        correction = self._correction_of(data)
        if correction is not None:
            metrics.update(compat.compute_rollout_correction_and_add_to_batch(data, correction)[1])

    def _bypasses_pass(self) -> bool:
        """True if old log-probs are the rollout's."""
        return bool((self.config.algorithm.get("rollout_correction", None) or {}).get("bypass_mode", False))

    def _check_adapter(
        self, batch: KVBatchMeta, metrics: dict[str, Any], adapted: dict[str, torch.Tensor] | None
    ) -> None:
        """Compare the rollout's log-probs with the trainer's, with and without adapter.

        Those with it are `adapted`, else the old ones. Those without are the reference policy's, for which a run
        without a KL term needs an extra pass.
        """
        version, real = self.global_steps - 1, queue_rows.real_rows(batch)
        rows = [row for row in real if self._adapter_check.is_comparable(batch.tags[row], version)]
        if rows and not self.use_reference_policy:
            self._run_reference(batch)
        if rows:
            keys = [batch.keys[row] for row in rows]
            metrics.update(self._adapter_check.judge(*queue_rows.fetch_log_probs(keys, batch.partition_id, adapted)))

    def _correction_of(self, data: DataProto) -> DictConfig | None:
        """`algorithm.rollout_correction` if it compares these rows with the rollout, even if only for metrics."""
        correction = self.config.algorithm.get("rollout_correction", None)
        if correction is None or self._bypasses_pass() or "rollout_log_probs" not in data.batch:
            return None
        return correction

    def _compute_metrics(
        self, batch: KVBatchMeta, metrics: dict[str, Any], timing_raw: dict[str, float], global_steps: int, epoch: int
    ) -> None:
        started = time.perf_counter()
        if self._reports_later:
            self._report_log_probs_of_update(batch, metrics)
        if len(self._updates) > 1:
            metrics.update(step_metrics.totals_of_updates(self._updates))
        self._updates.clear()
        real = batch.select_keys([batch.keys[row] for row in queue_rows.real_rows(batch)])
        super()._compute_metrics(real, metrics, timing_raw, global_steps=global_steps, epoch=epoch)
        figures = queue_rows.fetch_session_figures(real, Sessions.from_keys(real.keys).final_rows)
        metrics.update(step_metrics.session_metrics(figures))
        metrics["tree/metrics_seconds"] = time.perf_counter() - started
        step_metrics.put_tree_metrics_last(metrics)
