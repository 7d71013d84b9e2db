"""What the trainer computes alone runs beside a pass or a rollout, and changes no number."""

import time
from pathlib import Path
from typing import Any

import pytest
import torch
from local_trainer import BRANCHES, LocalQueue, OneWorker, make_trainer, put_rows, trainer_config

from tree_rl.verl_plugin.compat import PPOTrainer, PPOTrainerSync
from tree_rl.verl_plugin.trainer.queue_rows import (
    UNREAD_BY_PASSES,
    log_prob_request,
    log_probs_of_pass,
    with_engine_fields,
)
from tree_rl.verl_plugin.trainer.tree_trainer import TreeTrainerMixin

COLUMNS = ("advantages", "returns", "ref_log_prob")


@pytest.mark.parametrize("has_kl_reward", (False, True))
def test_advantages_beside_a_pass_are_those_behind_it(queue: LocalQueue, model_path: Path, has_kl_reward: bool) -> None:
    worker = OneWorker(model_path, queue)
    found, metrics_of = [], []
    for is_beside in (False, True):
        trainer = make_trainer(ranks=1, config=trainer_config("token-mean", None), use_kl_in_reward=has_kl_reward)
        trainer.use_reference_policy, trainer.ref_in_actor = True, False
        trainer.actor_rollout_wg = trainer.ref_policy_wg = worker
        queue.rows.clear()
        torch.manual_seed(0)
        metrics: dict[str, Any] = {}
        batch = trainer._balance_batch(put_rows(queue, BRANCHES), metrics)
        if is_beside:
            assert not set(UNREAD_BY_PASSES) & set(log_prob_request(batch, 0.9).fields)
            left = set(with_engine_fields(batch, trains=True).fields) & set(UNREAD_BY_PASSES)
            assert left == {"prompts", "responses"}, "verl's losses cut responses by them"
            batch = trainer._compute_ref_log_prob(batch, metrics)
            assert (trainer._with_advantages is None) == has_kl_reward
        else:
            # verl's cut of the same log-probs.
            with_adapter = log_probs_of_pass(worker, batch, 0.9)
            for key, row in with_adapter.items():
                queue.rows[key]["ref_log_prob"] = row
        batch = trainer._compute_advantage(batch, metrics)
        assert trainer._with_advantages is None
        found.append({(key, name): queue.rows[key][name] for key in batch.keys for name in COLUMNS})
        metrics_of.append(metrics)
    for place, values in found[0].items():
        assert torch.equal(found[1][place], values), place
    assert metrics_of[0] == metrics_of[1]


@pytest.mark.parametrize(
    "steps, epochs, skips, profiled, begins",
    (
        (9, 9, False, False, True),
        *((5, 9, False, False, False), (9, 1, False, False, False)),
        *((9, 9, True, False, False), (9, 9, False, True, False)),
    ),
)
def test_the_next_sessions_run_while_metrics_are_computed(
    monkeypatch: pytest.MonkeyPatch, steps: int, epochs: int, skips: bool, profiled: bool, begins: bool
) -> None:
    made = {"trainer": {"total_epochs": epochs}, "skip": {"rollout_tq": {"enable": skips}}}
    trainer = make_trainer(config=made)
    trainer.total_training_steps, trainer.steps_per_epoch, trainer.curr_step_profile = steps, 5, profiled
    events: list[Any] = []
    monkeypatch.setattr(PPOTrainer, "_add_batch_to_generate", lambda self: events.append(self.global_steps))
    monkeypatch.setattr(TreeTrainerMixin, "_compute_metrics", lambda *_, **__: events.append("metrics"))
    assert PPOTrainerSync.prepare_step is PPOTrainer.prepare_step
    trainer._compute_metrics(None, {}, {}, 5, 1)
    assert trainer.global_steps == 5
    trainer.global_steps = 6
    time.sleep(0.1)
    assert trainer.prepare_step() == {}
    trainer._compute_metrics(None, {}, timing := {"gen": 2.0, "step": 3.0}, 6, 1)
    # Seconds of sessions that ran before their step count as seconds of the step.
    ahead = timing["gen"] - 2.0
    assert timing["step"] == 3.0 + ahead and (0.1 <= ahead < 5 if begins else ahead == 0)
    trainer.prepare_step()
    assert events == [6, "metrics", 7, "metrics"] if begins else events == ["metrics", 6, "metrics", 6]


def test_log_probs_of_several_updates_are_reported_at_once(monkeypatch: pytest.MonkeyPatch, queue: LocalQueue) -> None:
    """Those of one update wait until verl reads metrics, in test_trainer_skips_the_pass.py."""
    trainer = make_trainer(ranks=1)
    trainer._steps, trainer._reuses_log_probs, trainer.parameter_sync_step = (1, 1), True, 2
    trainer.actor_rollout_wg.world_size = 1
    reports: list[Any] = []
    monkeypatch.setattr(PPOTrainer, "_update_actor", lambda self, batch, metrics: batch)
    monkeypatch.setattr(TreeTrainerMixin, "_report_log_probs_of_update", lambda self, *given: reports.append(given))
    monkeypatch.setattr("tree_rl.verl_plugin.trainer.step_metrics.explained_layout", lambda *_, **__: "")
    trainer._update_actor(put_rows(queue, [[1]]), {})
    assert not trainer._reports_later and len(reports) == 1


def test_metrics_tell_how_long_a_trainer_apart_would_wait_for_them(
    monkeypatch: pytest.MonkeyPatch, queue: LocalQueue
) -> None:
    trainer = make_trainer()
    trainer._updates, trainer._reports_later = [], False
    monkeypatch.setattr(PPOTrainer, "_compute_metrics", lambda *_, **__: time.sleep(0.05))
    TreeTrainerMixin._compute_metrics(trainer, put_rows(queue, [[1]]), metrics := {}, {}, 5, 1)
    assert 0.05 <= metrics["tree/metrics_seconds"] < 5
