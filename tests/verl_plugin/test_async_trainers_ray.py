"""verl's stock `main_ppo` with the two asynchronous tree trainers on two CPU cores.

python -m pytest -m slow tests/verl_plugin/test_async_trainers_ray.py
"""

from pathlib import Path

import pytest
import toy_qwen

pytestmark = [pytest.mark.ray, pytest.mark.slow, pytest.mark.timeout(600)]

PROMPTS, SESSIONS, STEPS = 4, 3, 4
ACTOR, ROLLOUT, V1 = "actor_rollout_ref.actor", "actor_rollout_ref.rollout", "trainer.v1"
ENVIRONMENT = """
from verl.trainer.ppo.v1.replay_buffer import ReplayBufferAsync

from tree_rl.rollout.environments import ShellEnvironment
from tree_rl.rollout.sandbox.sandbox import SandboxOptions


class EagerBuffer(ReplayBufferAsync):
    def __init__(self, **settings):
        super().__init__(poll_interval=0.05, **settings)


class LengthEnvironment(ShellEnvironment):
    def __init__(self):
        super().__init__(SandboxOptions(unconfined=True))

    async def score(self, outcome):
        return float(len(outcome.answer) % 3)
"""


def train(tmp_path: Path, *overrides: str) -> list[dict[str, float]]:
    """Run `main_ppo` on branching sessions and return the metrics of every step."""
    (tmp_path / "toy_environment.py").write_text(ENVIRONMENT)
    prompts = toy_qwen.save_prompts(tmp_path / "prompts.parquet", toy_qwen.PROMPTS, agent_name="tree_tool_agent")
    model, reward = toy_qwen.save_model(tmp_path / "model"), toy_qwen.save_reward(tmp_path / "reward.py")
    given = [
        *toy_qwen.ppo_overrides(model, prompts, reward, tmp_path / "out"),
        toy_qwen.TREE_MANAGER,
        f"+{ROLLOUT}.custom.tree_agent.environment=toy_environment.LengthEnvironment",
        "algorithm.rollout_correction.rollout_is=token",
        *toy_qwen.under("trainer", f"total_training_steps={STEPS}", "total_epochs=100", "n_gpus_per_node=1"),
        *overrides,
    ]
    environment = toy_qwen.job_environment(tmp_path)
    finished = toy_qwen.run_main_ppo(tmp_path, given, environment=environment, seconds=580)
    steps = toy_qwen.read_metrics(finished.stdout)
    assert len(steps) == STEPS
    for figures in steps:
        # A torn group would bring fewer sessions than its prompt has.
        assert figures["tree/sessions"] == PROMPTS * SESSIONS
        assert figures["tree/por"] > 0
        assert figures["actor/grad_norm"] > 0
    return steps


def test_colocated_rollouts_lag_behind_and_continue_exactly_with_the_next_weights(tmp_path: Path) -> None:
    # Few slots and a buffer that looks often: no step waits for all generations, so some are cut short and resumed.
    # A learning rate of zero gives every step a new version of the same weights: then rows of any versions, continued
    # ones too, have the trainer's log-probs, unless a token or its log-prob was misplaced on the way.
    steps = train(
        tmp_path,
        *toy_qwen.under(V1, "trainer_mode=tree_colocate_async", "colocate_async.num_warmup_batches=1"),
        *toy_qwen.under(f"{V1}.sampler.custom_sampler", "path=pkg://toy_environment", "name=EagerBuffer"),
        *(f"{ROLLOUT}.max_num_seqs=6", f"{ACTOR}.optim.lr=0"),
        "+ray_kwargs.ray_init.num_gpus=1",
    )
    assert max(figures["training/rollout_probs_diff_max"] for figures in steps) < 1e-6
    assert steps[0]["tree/staleness/oldest/max"] == 0
    assert max(figures["tree/staleness/oldest/max"] for figures in steps) >= 1
    assert max(figures["tree/mixed_version_rows"] for figures in steps) > 0
    assert max(figures["training/off_policy/trajectory_spans/max"] for figures in steps) >= 2
    for figures in steps:
        assert figures["tree/staleness/oldest/mean"] >= figures["tree/staleness/newest/mean"] >= 0
        assert figures["rollout_corr/rollout_is_mean"] == pytest.approx(1, abs=1e-4)


def test_separate_rollouts_receive_the_weights_that_the_old_log_probs_come_from(tmp_path: Path) -> None:
    # Without warm-up batches every row of a step is drawn by the weights that the step before it sent. Both updates of
    # a step take their old log-probs from those weights, so they equal the rollout's only if all of this is exact.
    steps = train(
        tmp_path,
        f"{V1}.trainer_mode=tree_separate_async",
        *toy_qwen.under(f"{V1}.separate_async", "num_warmup_batches=0", "parameter_sync_step=2"),
        # Without a correction the first update finds them itself; the second one needs weights put aside before it.
        "algorithm.rollout_correction.rollout_is=null",
        *toy_qwen.under(ACTOR, "ppo_mini_batch_size=2", "optim.lr=1e-2"),
        *toy_qwen.under(ROLLOUT, "nnodes=1", "n_gpus_per_node=1", "checkpoint_engine.backend=gloo"),
        f"{ROLLOUT}.checkpoint_engine.custom_backend_module=tree_rl.verl_plugin.embedded_rollout.gloo_weights",
        "+ray_kwargs.ray_init.num_gpus=2",
    )
    assert max(figures["training/rollout_probs_diff_max"] for figures in steps) < 1e-6
    assert max(figures["tree/staleness/oldest/max"] for figures in steps) == 0
    assert steps[-1]["actor/ppo_kl"] != 0
    assert [figures["tree/reused_log_probs"] for figures in steps] == [0.5] * STEPS
