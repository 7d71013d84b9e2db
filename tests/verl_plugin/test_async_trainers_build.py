"""The three tree trainers as verl builds them: its own mode's semantics, our workers in every role, refusals by key."""

import subprocess
import sys
from typing import Any

import pytest
from local_trainer import config_of_mode
from toy_qwen import under
from verl.trainer.ppo.utils import Role
from verl.trainer.ppo.v1 import get_trainer_cls
from verl.trainer.ppo.v1.replay_buffer import ReplayBufferAsync

from tree_rl.verl_plugin.refusals.refusal import UnsupportedFeatureError
from tree_rl.verl_plugin.trainer.tree_trainer import POLL_SECONDS
from tree_rl.verl_plugin.trainer.workers import TreeActorRolloutRefWorker, TreeDetachActorWorker, TreeTrainingWorker

MODES = ("tree_sync", "tree_colocate_async", "tree_separate_async")


def build(mode: str, *overrides: str) -> Any:
    """A trainer up to its worker classes, which is as far as verl goes without Ray."""
    trainer = get_trainer_cls(mode)(config_of_mode(mode, *overrides))
    trainer._init_resource_pool_mgr()
    return trainer


def workers(trainer: Any) -> dict[Role, type]:
    actors = trainer.role_worker_mapping.items()
    return {role: actor.__ray_metadata__.modified_class.__mro__[1] for role, actor in actors}


@pytest.mark.parametrize("mode", MODES)
def test_each_trainer_has_its_modes_semantics_and_our_workers(mode: str) -> None:
    trainer = build(mode, "algorithm.adv_estimator=gae", "actor_rollout_ref.actor.use_kl_loss=True")
    actor = TreeDetachActorWorker if mode == "tree_separate_async" else TreeActorRolloutRefWorker
    assert trainer.trainer_mode == mode.removeprefix("tree_")
    assert isinstance(trainer.replay_buffer, ReplayBufferAsync) == (mode != "tree_sync")
    assert trainer.replay_buffer.poll_interval == POLL_SECONDS < 1, "verl's two seconds would be waited every step"
    assert trainer.parameter_sync_step == (2 if mode == "tree_separate_async" else 1)
    assert workers(trainer) == {Role.ActorRolloutRef: actor, Role.Critic: TreeTrainingWorker}


def test_separate_rollouts_alone_leave_actor_and_reference_to_our_worker() -> None:
    options = under("actor_rollout_ref", "actor.use_kl_loss=True", "hybrid_engine=False")
    trainer = build("tree_separate_async", "algorithm.adv_estimator=grpo", *options)
    assert workers(trainer) == {Role.Actor: TreeDetachActorWorker, Role.RefPolicy: TreeDetachActorWorker}


@pytest.mark.parametrize("mode", MODES)
def test_every_tree_trainer_refuses_what_trees_cannot_do(mode: str) -> None:
    with pytest.raises(UnsupportedFeatureError, match=r"adv_estimator=remax"):
        build(mode, "algorithm.adv_estimator=remax")


@pytest.mark.slow
@pytest.mark.parametrize("module", ["workers", "tree_estimators"])
def test_a_process_can_import_any_module_first(module: str) -> None:
    # verl's import of its engines loads ours: a worker that starts with another module must not run in a circle.
    subprocess.run([sys.executable, "-c", f"import tree_rl.verl_plugin.trainer.{module}"], timeout=120, check=True)
