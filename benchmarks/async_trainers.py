"""Reward curves of `tree_sync` and `tree_colocate_async` on the quickstart's task, from one warm start.

    OMP_NUM_THREADS=2 PYTHONPATH=.:kernels:recipes python benchmarks/async_trainers.py outputs/async

Everything but the trainer is the same; seeds decide the order of the tasks and the
sampling. Runs that are there already are kept, so an interrupted comparison goes on, and processes with a seed and a
trainer each may run side by side. Writes `async_trainers.csv` of the runs that have ended.
"""

import argparse
import os
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from statistics import mean, stdev

from quickstart.progress import read_steps, run_phase, say
from quickstart.run import Settings, phases

from tree_rl.benchmark.provenance import provenance
from tree_rl.benchmark.results import write_csv

TRAINERS = ("tree_sync", "tree_colocate_async")
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
STUDENT_95 = {2: 12.706, 3: 4.303, 4: 3.182, 5: 2.776, 6: 2.571, 7: 2.447, 8: 2.365, 9: 2.306, 10: 2.262}
"""Number of differences -> two-sided 95 % quantile of Student's distribution."""
Runs = Mapping[tuple[str, int], list[dict[str, float]]]
"""(trainer, seed) -> figures of each step."""


def train(settings: Settings, trainer: str, seed: int) -> None:
    """One run from the warm start in the output folder, which is made first if it is not there."""
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


def steps_of(metrics: Path) -> list[dict[str, float]]:
    """Figures of each step of a run."""
    return [
        {column: float(data[name]) for column, name in COLUMNS.items()}
        for _, data in read_steps(metrics)
        if COLUMNS["reward"] in data
    ]


def write(path: Path, runs: Runs, about: Mapping[str, str]) -> None:
    """One line per run and step."""
    rows = [
        {"trainer": trainer, "seed": seed, "step": number, **step, **about}
        for (trainer, seed), steps in runs.items()
        for number, step in enumerate(steps, start=1)
    ]
    write_csv(path, rows)


def rewards_of(runs: Runs) -> dict[str, dict[int, tuple[float, float]]]:
    """Trainer -> seed -> mean reward over all and over the last steps."""
    found: dict[str, dict[int, tuple[float, float]]] = {}
    for (trainer, seed), steps in runs.items():
        rewards = [step["reward"] for step in steps]
        found.setdefault(trainer, {})[seed] = mean(rewards), mean(rewards[-LAST:])
    return found


def summarise(runs: Runs) -> str:
    """Reward of every run, the spread over seeds, and what is known of the difference between the trainers."""
    found = rewards_of(runs)
    lines = [
        f"{trainer:<20} seed {seed}  all steps {whole:.3f}  last {LAST} {last:.3f}"
        for trainer, by_seed in found.items()
        for seed, (whole, last) in by_seed.items()
    ]
    for trainer, by_seed in found.items():
        spreads = [
            f"{mean(values):.3f} +- {stdev(values):.3f}" if len(values) > 1 else f"{values[0]:.3f}"
            for values in zip(*by_seed.values(), strict=True)
        ]
        lines.append(f"{trainer:<20} {len(by_seed)} seeds  all steps {spreads[0]}  last {LAST} {spreads[1]}")
    if len(found) == 2:
        lines += compare(*found.items())
    return "\n".join(lines)


def compare(
    one: tuple[str, dict[int, tuple[float, float]]], other: tuple[str, dict[int, tuple[float, float]]]
) -> list[str]:
    """Differences seed by seed, their mean with its 95 % interval, and whether it contains 0.

    Seeds share warm start and tasks, so that pairs differ less than runs do. The width of the interval is the smallest
    difference that these seeds could have shown.
    """
    (name, here), (reference, there) = one, other
    seeds = sorted(here.keys() & there.keys())
    lines = []
    for column, what in enumerate(("all steps", f"last {LAST} steps")):
        differences = [here[seed][column] - there[seed][column] for seed in seeds]
        listed = ", ".join(f"{difference:+.3f}" for difference in differences)
        line = f"{name} less {reference}, {what}: {listed}"
        if len(seeds) in STUDENT_95:
            half = STUDENT_95[len(seeds)] * stdev(differences) / len(seeds) ** 0.5
            verdict = "within noise" if abs(mean(differences)) <= half else "NOT within noise"
            line += f"; mean {mean(differences):+.3f} +- {half:.3f} (95 %): {verdict}"
        lines.append(line)
    return lines


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("output", type=Path)
    parser.add_argument("--trainers", nargs="+", choices=sorted(TRAINERS), default=sorted(TRAINERS, reverse=True))
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    parser.add_argument("--steps", type=int, default=25)
    parser.add_argument("--commit", default=None, help="to write beside figures; asked of git if left out")
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
    for seed in arguments.seeds:
        for trainer in arguments.trainers:
            train(settings, trainer, seed)
    found = {
        (trainer, seed): steps
        for trainer in arguments.trainers
        for seed in arguments.seeds
        if len(steps := steps_of(settings.output / f"{trainer}_{seed}.jsonl")) >= arguments.steps
    }
    about = provenance(commit=arguments.commit, packages=("torch", "transformers", "verl", "ray"))
    write(settings.output / "async_trainers.csv", found, about)
    print(summarise(found))
