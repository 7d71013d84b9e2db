"""Reward curves of `tree_sync` and `tree_colocate_async` on the quickstart's task, from one warm start.

    OMP_NUM_THREADS=2 PYTHONPATH=.:kernels:recipes python benchmarks/async_trainers.py outputs/async

Everything but the trainer and its polling of finished prompts is the same; seeds decide the order of the tasks and the
sampling. Runs that are there already are kept, so an interrupted comparison goes on. Writes `async_trainers.csv`.
"""

import argparse
import csv
import os
from dataclasses import replace
from pathlib import Path
from statistics import mean, stdev

from quickstart.progress import read_steps, run_phase, say
from quickstart.run import Settings, phases

SAMPLERS = {"tree_sync": "EagerReplayBuffer", "tree_colocate_async": "EagerReplayBufferAsync"}
COLUMNS = {
    "reward": "tree/session_score/mean",
    "staleness_oldest_mean": "tree/staleness/oldest/mean",
    "staleness_oldest_max": "tree/staleness/oldest/max",
    "staleness_newest_mean": "tree/staleness/newest/mean",
    "mixed_version_rows": "tree/mixed_version_rows",
    "mixed_version_trees": "tree/mixed_version_trees",
    "is_weight_mean": "rollout_corr/rollout_is_mean",
    "step_seconds": "timing_s/step",
}
LAST = 5


def train(settings: Settings, trainer: str, seed: int) -> list[dict[str, float]]:
    """One run from the warm start in the output folder, made first if it is not there; its metrics by step."""
    prepare, sft, grpo, _ = phases(settings)
    if not (settings.output / "sft" / f"global_step_{settings.sft_steps}" / "huggingface").exists():
        for phase in (prepare, sft):
            run_phase(phase)
    metrics = settings.output / f"{trainer}_{seed}.jsonl"
    if len(read_steps(metrics)) < settings.steps:
        say(trainer, f"seed {seed}")
        overrides = [
            f"data.seed={seed}",
            f"actor_rollout_ref.rollout.seed={seed}",
            "algorithm.rollout_correction.rollout_is=token",
            f"trainer.v1.trainer_mode={trainer}",
            f"trainer.v1.sampler.custom_sampler.name={SAMPLERS[trainer]}",
            f"trainer.default_local_dir={settings.output / trainer / str(seed)}",
            "actor_rollout_ref.rollout.custom.tree_dump_dir=null",
        ]
        changed = {override.partition("=")[0] for override in overrides}
        kept = [argument for argument in grpo.command if argument.partition("=")[0] not in changed]
        run_phase(
            replace(
                grpo,
                command=[*kept, *overrides],
                log=metrics.with_suffix(".log"),
                metrics=metrics,
                environment={"VERL_FILE_LOGGER_PATH": str(metrics)},
            )
        )
    return [
        {column: float(data[name]) for column, name in COLUMNS.items()}
        for _, data in read_steps(metrics)
        if COLUMNS["reward"] in data
    ]


def write(path: Path, runs: dict[tuple[str, int], list[dict[str, float]]]) -> None:
    """One line per run and step."""
    with path.open("w", newline="") as file:
        writer = csv.writer(file, lineterminator="\n")
        writer.writerow(["trainer", "seed", "step", *COLUMNS])
        for (trainer, seed), steps in runs.items():
            for number, step in enumerate(steps, start=1):
                writer.writerow([trainer, seed, number, *(f"{step[column]:.6g}" for column in COLUMNS)])


def summarise(runs: dict[tuple[str, int], list[dict[str, float]]]) -> None:
    """Mean reward of every run over all and over the last steps; then per trainer, with the spread over seeds."""
    by_trainer: dict[str, list[tuple[float, float]]] = {}
    for (trainer, seed), steps in runs.items():
        rewards = [step["reward"] for step in steps]
        figures = mean(rewards), mean(rewards[-LAST:])
        by_trainer.setdefault(trainer, []).append(figures)
        print(f"{trainer:<20} seed {seed}  all steps {figures[0]:.3f}  last {LAST} {figures[1]:.3f}")
    for trainer, figures in by_trainer.items():
        whole, last = zip(*figures, strict=True)
        spread = (stdev(whole), stdev(last)) if len(figures) > 1 else (float("nan"), float("nan"))
        print(
            f"{trainer:<20} {len(figures)} seeds  all steps {mean(whole):.3f} +- {spread[0]:.3f}  "
            f"last {LAST} {mean(last):.3f} +- {spread[1]:.3f}"
        )


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("output", type=Path)
    parser.add_argument("--trainers", nargs="+", choices=sorted(SAMPLERS), default=sorted(SAMPLERS, reverse=True))
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    parser.add_argument("--steps", type=int, default=25)
    arguments = parser.parse_args()
    # What `scripts/quickstart.sh` sets for the same processes.
    os.environ |= {"OMP_WAIT_POLICY": "passive", "TORCH_COMPILE_DISABLE": "1", "HF_HUB_OFFLINE": "1"}
    settings = Settings(
        output=arguments.output.resolve(),
        seed=0,
        demonstrations=1500,
        sft_steps=420,
        steps=arguments.steps,
        limit_seconds=1200,
    )
    settings.output.mkdir(parents=True, exist_ok=True)
    found = {
        (trainer, seed): train(settings, trainer, seed) for seed in arguments.seeds for trainer in arguments.trainers
    }
    write(settings.output / "async_trainers.csv", found)
    summarise(found)
