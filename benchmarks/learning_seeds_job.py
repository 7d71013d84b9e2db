"""Several runs of verl's `main_ppo` one after another in one job: processes start once, weights and data for each run.

The runs may differ in what the trainer and the agent loops read: estimator, sessions, branching, seeds, folders.
`learning_seeds.py` starts it: python benchmarks/learning_seeds_job.py RUNS.json, a list of `Run`s.
"""

import json
import os
import sys
from dataclasses import dataclass
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


@dataclass(frozen=True, kw_only=True, slots=True)
class Run:
    """One run of the job."""

    folder: str
    """Gets `steps.jsonl`, and `made_by.json` when the run ends."""
    arguments: list[str]
    """Command line of `tree_rl.train`."""
    made_by: dict[str, Any]
    """Content of `made_by.json`."""


class RunsInTurn(TaskRunnerV1.__ray_actor_class__):
    """verl's task runner for a list of runs."""

    def __init__(self, runs: list[tuple[Run, DictConfig]]) -> None:
        super().__init__()
        self._runs = runs

    def run(self, config: DictConfig) -> None:
        """Train each run from the weights on disk.

        Args:
            config: of the first run.
        """
        tq.init(config.transfer_queue)
        try:
            for run, config_of_run in self._runs:
                os.environ["VERL_FILE_LOGGER_PATH"] = str(Path(run.folder) / "steps.jsonl")
                self._begin(config_of_run)
                self.init_agent_loop_manager()
                self.trainer.fit(self.agent_loop_manager)
                for worker in self.agent_loop_manager.agent_loop_workers:
                    ray.kill(worker)
                (Path(run.folder) / "made_by.json").write_text(json.dumps(run.made_by))
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
    runs = [Run(**run) for run in json.loads(Path(sys.argv[1]).read_text())]
    configs = []
    for run in runs:
        job = read_job(run.arguments, PROGRAM)
        make_ready(job.config, job.given)
        job.config.transfer_queue.enable = True
        configs.append(job.config)
    pairs = list(zip(runs, configs, strict=True))

    class OfThisJob(RunsInTurn):
        def __init__(self) -> None:
            super().__init__(pairs)

    run_ppo(configs[0], task_runner_class=ray.remote(OfThisJob))


if __name__ == "__main__":
    main()
