"""The trainers run verl's pass for old log-probs only where the update will not find the same ones itself."""

import re
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import Mock, call

import pytest
import torch
from engine_harness import nested
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from local_trainer import BRANCHES, LocalQueue, OneWorker, config_of_mode, make_trainer, put_rows, trainer_config
from omegaconf import OmegaConf
from tensordict import TensorDict
from toy_qwen import under
from verl.protocol import DataProto
from verl.trainer.ppo.v1 import get_trainer_cls

from tree_rl.verl_plugin import compat
from tree_rl.verl_plugin.refusals.refusal import UnsupportedFeatureError
from tree_rl.verl_plugin.trainer.old_log_probs import LogProbReuse
from tree_rl.verl_plugin.trainer.prepared_config import prepare_config
from tree_rl.verl_plugin.trainer.queue_rows import fetch_response_log_probs, fetch_trained_log_probs
from tree_rl.verl_plugin.trainer.trainers import PPOTrainerTreeSeparateAsync

ONE_STEP = ["data.train_batch_size=8", "actor_rollout_ref.actor.ppo_mini_batch_size=8"]
CONFLICTS = (
    *under("actor_rollout_ref.actor", "ppo_epochs=2", "fsdp_config.router_replay.mode=R2"),
    *under("algorithm", "use_kl_in_reward=True", "adv_estimator=optimal_token_baseline"),
    *under("algorithm.rollout_correction", "bypass_mode=True", "rollout_is=token", "rollout_rs=token_k1"),
    *("actor_rollout_ref.model.model_type=language_model", "distillation.enabled=True"),
)


def choice(setting: Any, *overrides: str, mode: str = "tree_sync", coef: float | None = None) -> LogProbReuse:
    """What a trainer makes of verl's config and a `tree:` block."""
    limit = "algorithm.rollout_correction.rollout_rs_threshold=2.0"
    made = config_of_mode(mode, *(ONE_STEP if mode == "tree_sync" else []), limit, *overrides)
    made.actor_rollout_ref.actor.fsdp_config.tree = {"reuse_log_probs": setting, "router_aux_loss_coef": coef}
    prepare_config(made)
    return LogProbReuse.of(made)


@pytest.mark.parametrize("setting", ("auto", True))
def test_one_optimizer_step_with_the_same_weights_needs_no_pass(setting: Any) -> None:
    # While only the critic trains, the update has no log-probs.
    assert choice(setting).serves(1) and not choice(setting).serves(0)
    # R3 repeats routes of the rollout, which are there before the update.
    assert choice(setting, "actor_rollout_ref.actor.fsdp_config.router_replay.mode=R3").serves(1)
    assert choice(setting, coef=0.0).serves(1)
    # With a loss of the routers nothing would be saved.
    assert choice(setting, coef=0.1).serves(1) == (setting is True)
    assert not choice(False).serves(1)


@pytest.mark.parametrize("override", CONFLICTS)
def test_what_needs_them_earlier_keeps_the_pass_or_is_refused_by_name(override: str) -> None:
    assert not choice("auto", override).serves(1)
    with pytest.raises(UnsupportedFeatureError, match=rf"tree\.reuse_log_probs=True, but .*{re.escape(override)}"):
        choice(True, override)


def test_true_is_refused_where_a_batch_takes_several_optimizer_steps() -> None:
    with pytest.raises(UnsupportedFeatureError, match=r"ppo_mini_batch_size=4 cuts the 8 prompts"):
        choice(True, "actor_rollout_ref.actor.ppo_mini_batch_size=4")
    with pytest.raises(UnsupportedFeatureError, match="the update takes 2 optimizer steps"):
        choice(True).serves(2)
    assert not choice("auto").serves(2)


def test_the_log_says_each_source_once(caplog: pytest.LogCaptureFixture) -> None:
    chosen = choice("auto")
    for steps in (1, 1, 2, 1, 2):
        chosen.serves(steps)
    said = [record.getMessage() for record in caplog.records if record.getMessage().startswith("old log-probs")]
    assert len(said) == 2
    assert "the update's forward" in said[0] and "the update takes 2 optimizer steps" in said[1]


def test_separate_rollouts_reuse_and_put_weights_aside(queue: LocalQueue, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(UnsupportedFeatureError, match=r"separate_async\.parameter_sync_step=2"):
        choice(True, mode="tree_separate_async")
    each_synchronised = ["trainer.v1.separate_async.parameter_sync_step=1", "data.train_batch_size=4"]
    assert choice(True, *each_synchronised, mode="tree_separate_async").conflict is None
    trainer = PPOTrainerTreeSeparateAsync.__new__(PPOTrainerTreeSeparateAsync)
    trainer.config = config_of_mode("tree_separate_async", "trainer.critic_warmup=0")
    trainer._reuse, trainer._steps, trainer.global_steps = choice("auto", mode="tree_separate_async"), (1, 1), 3
    trainer.parameter_sync_step, trainer.actor_rollout_wg = 2, Mock()
    trainer.local_trigger_step = 0
    trainer._compute_old_log_prob(SimpleNamespace(extra_info={}), metrics := {})
    assert trainer.actor_rollout_wg.method_calls == [call.save_model_to_cpu(0)]
    assert metrics["tree/reused_log_probs"] == 1
    trainer.local_trigger_step = 1
    asked: list[str] = []
    base = "verl.trainer.ppo.v1.trainer_base.PPOTrainer._compute_old_log_prob"
    monkeypatch.setattr(base, lambda *_, **__: asked.append("pass"))
    trainer._compute_old_log_prob(put_rows(queue, [[1]]), metrics)
    assert asked == ["pass"] and call.restore_model_from_cpu(0) in trainer.actor_rollout_wg.method_calls
    assert metrics["tree/reused_log_probs"] == 0


@pytest.mark.parametrize(
    "loss_agg_mode, correction",
    (
        ("token-mean", None),
        ("seq-mean-token-sum-norm", None),
        ("seq-mean-token-sum", {"rollout_is": None, "rollout_rs": None, "bypass_mode": False}),
    ),
)
def test_metrics_and_columns_are_those_of_the_pass_with_one_forward_less(
    queue: LocalQueue, model_path: Path, capsys: pytest.CaptureFixture[str], loss_agg_mode: str, correction: Any
) -> None:
    runs = []
    for setting in (False, "auto"):
        trainer = make_trainer(ranks=1, config=trainer_config(loss_agg_mode, correction))
        trainer._reuse = LogProbReuse(setting=setting, conflict=None if setting else "false")
        queue.rows.clear()
        torch.manual_seed(0)
        batch = put_rows(queue, BRANCHES)
        for row in queue.rows.values():
            del row["old_log_probs"]
        trainer.actor_rollout_wg = worker = OneWorker(model_path, queue)
        batch = trainer._compute_old_log_prob(trainer._balance_batch(batch, metrics := {}), metrics)
        batch = trainer._compute_advantage(batch, metrics)
        trainer._update_actor(batch, metrics)
        assert trainer._reports_later == bool(setting)
        if setting:
            trainer._report_log_probs_of_update(batch, metrics)
            for key, log_probs in fetch_response_log_probs(batch).items():
                row = queue.rows[key]
                row["old_log_probs"], cut = log_probs, len(row["response_mask"]) + 1
                row["entropy"] = row["entropy"][-cut:-1]
        assert "layout: 1 rank: trees, " in capsys.readouterr().out
        columns = {(key, name): queue.rows[key][name] for key in batch.keys for name in ("old_log_probs", "entropy")}
        runs.append((metrics, worker.forwards, columns))
    (expected, more, old), (got, fewer, new) = runs
    assert (expected.pop("tree/reused_log_probs"), got.pop("tree/reused_log_probs")) == (0, 1)
    assert fewer == more // 2 == 1
    assert expected.keys() == got.keys() >= {"actor/entropy", "training/rollout_probs_diff_max", "actor/grad_norm"}
    assert any(name.startswith("rollout_corr/") for name in got) == (correction is not None)
    varying = ("perf/", "mfu", "seconds")
    for name, value in expected.items():
        if not any(part in name for part in varying):
            assert got[name] == pytest.approx(value, rel=1e-5, abs=1e-6, nan_ok=True), name
    for place, values in old.items():
        torch.testing.assert_close(new[place], values, rtol=1e-5, atol=1e-5)


@given(lengths=st.lists(st.integers(1, 40), min_size=1, max_size=8), share=st.floats(0, 1), seed=st.integers(0, 99))
@settings(deadline=None, max_examples=50, suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_trained_tokens_alone_have_the_metrics_of_whole_responses(
    queue: LocalQueue, lengths: list[int], share: float, seed: int
) -> None:
    draw = torch.Generator().manual_seed(seed)

    def column(prompt: int) -> torch.Tensor:
        return nested([-torch.rand(prompt + length, generator=draw) for length in lengths])

    masks = [(torch.rand(length, generator=draw) < share).long() for length in lengths]
    masks[seed % len(masks)][0] = 1
    columns = {"log_probs": column(3), "entropy": column(3), "rollout_log_probs": column(0)}
    columns["response_mask"] = mask = nested(masks)
    keys = [f"u_{row}_0" for row in range(len(lengths))]
    queue.rows.clear()
    batch = queue.kv_batch_put(keys, "train", fields=TensorDict(columns, batch_size=len(keys)), tags=[{} for _ in keys])
    found, longest = fetch_trained_log_probs(keys, "train")
    assert longest == max(lengths) and found.batch["entropy"].shape[1] == max(mask.sum() for mask in masks)

    whole = {"old_log_probs": compat.response_from_nested(columns["log_probs"], mask), "responses": mask}
    whole |= columns | {"entropy": compat.response_from_nested(columns["entropy"], mask)}
    del whole["log_probs"]
    for row, log_probs in enumerate(fetch_response_log_probs(batch).values()):
        torch.testing.assert_close(log_probs, whole["old_log_probs"].unbind()[row])
    expected = DataProto(batch=TensorDict(whole, batch_size=len(keys)).to_padded_tensor())
    rejection = {"rollout_rs": "seq_mean_k1", "rollout_rs_threshold": "0.5_2.0"}
    correction = OmegaConf.create({"rollout_is": "token", **rejection})
    metrics = []
    for data in (expected, found):
        own = compat.calculate_debug_metrics(data)
        for mode in ("token-mean", "seq-mean-token-sum", "seq-mean-token-mean"):
            batch = data.batch
            own[mode] = compat.agg_loss(batch["entropy"], batch["response_mask"], mode).item()
        metrics.append(own | compat.compute_rollout_correction_and_add_to_batch(data, correction)[1])
    for name, value in metrics[0].items():
        least = 1e-3 if name.endswith("_std") else 1e-5  # the root of a difference of sums
        assert metrics[1][name] == pytest.approx(value, rel=1e-4, abs=least, nan_ok=True), name


def test_verl_finds_the_trainers_option_in_the_actors_block() -> None:
    trainer = get_trainer_cls("tree_sync")(config_of_mode("tree_sync", *ONE_STEP))
    assert trainer._reuse.setting == "auto" and trainer._reuse.conflict is None
