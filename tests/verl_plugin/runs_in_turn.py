"""Several runs of verl's `main_ppo` one after another in one job: processes start once, weights and data for each run.

The runs may differ in what the trainer and the agent loops read: estimator, sessions, branching, seeds, folders.
Usage: python runs_in_turn.py RUNS.json, a list of [folder for `steps.jsonl`, arguments of `tree_rl.train`].
"""

import json
import os
import sys
from pathlib import Path
from typing import Any

import ray
import transfer_queue as tq
from omegaconf import DictConfig, OmegaConf
from verl.trainer.main_ppo import TaskRunnerV1, run_ppo
from verl.trainer.ppo.v1 import get_trainer_cls

from tree_rl.verl_plugin.launch.command_line import read_job
from tree_rl.verl_plugin.launch.train import PROGRAM, make_ready
from tree_rl.verl_plugin.trainer.prepared_config import prepare_config


class RunsInTurn(TaskRunnerV1.__ray_actor_class__):
    """verl's task runner for a list of runs."""

    def __init__(self, runs: list[tuple[str, DictConfig]]) -> None:
        super().__init__()
        self._runs = runs

    def run(self, config: DictConfig) -> None:
        """Train each run from the weights on disk.

        Args:
            config: of the first run.
        """
        tq.init(config.transfer_queue)
        try:
            for folder, config_of_run in self._runs:
                os.environ["VERL_FILE_LOGGER_PATH"] = str(Path(folder) / "steps.jsonl")
                self._begin(config_of_run)
                self.init_agent_loop_manager()
                self.trainer.fit(self.agent_loop_manager)
                for worker in self.agent_loop_manager.agent_loop_workers:
                    ray.kill(worker)
        finally:
            tq.close()

    def _begin(self, config: DictConfig) -> None:
        OmegaConf.resolve(config)
        self.config = config
        if self.trainer is None:
            self.trainer = get_trainer_cls(config.trainer.v1.trainer_mode)(config=config)
            self.trainer.init()
            return
        left = list((tq.kv_list("train") or {}).get("train", {}))
        if left:
            tq.kv_clear(keys=left, partition_id="train")
        trainer = self.trainer
        prepare_config(config, trainer.base_trainer_mode)
        trainer.config = config
        trainer._init_dataloader()
        trainer._init_dump_executor()
        trainer.replay_buffer = trainer._build_replay_buffer()
        ray.get([worker.__ray_call__.remote(_load_start) for worker in trainer.actor_rollout_wg.workers])
        trainer._load_checkpoint()
        trainer.on_init_end()


def _load_start(process: Any) -> None:
    """Build weights, optimizer and schedule anew, in the trainer's process."""
    for role in process.worker_dict.values():
        role.actor.reset()


def main() -> None:
    """Compose and check every run's config as `tree_rl.train` does, then run the job."""
    pairs = []
    for folder, arguments in json.loads(Path(sys.argv[1]).read_text()):
        job = read_job(arguments, PROGRAM)
        make_ready(job.config, job.given)
        job.config.transfer_queue.enable = True
        pairs.append((folder, job.config))

    class OfThisJob(RunsInTurn):
        def __init__(self) -> None:
            super().__init__(pairs)

    run_ppo(pairs[0][1], task_runner_class=ray.remote(OfThisJob))


if __name__ == "__main__":
    main()
