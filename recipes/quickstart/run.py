"""The quickstart from start to end: warm-up, GRPO, replay, report; their noise goes to log files."""

import argparse
import os
import sys
import time
from dataclasses import dataclass, fields, replace
from pathlib import Path

from quickstart.progress import Phase, PhaseFailedError, fail, run_phase, say

RECIPE = Path(__file__).parent
SFT_LINE_EVERY = 40


@dataclass(frozen=True, kw_only=True, slots=True)
class Sizes:
    """How much a run trains."""

    demonstrations: int
    """Sessions that the experts show."""
    sft_steps: int
    steps: int
    """GRPO steps."""
    prompts: int
    """Tasks of a GRPO step; eight sessions play each."""
    updates: int
    """Optimizer steps of a GRPO step."""
    repeats: int
    """Timed updates of the replay, of trees and of rows each."""


SHORT = Sizes(demonstrations=900, sft_steps=200, steps=5, prompts=6, updates=2, repeats=2)
FULL = Sizes(demonstrations=1500, sft_steps=420, steps=25, prompts=8, updates=1, repeats=5)


def phases(output: Path, sizes: Sizes, *, seed: int, limit_seconds: float) -> list[Phase]:
    """List the quickstart's processes, in order.

    Args:
        output: everything is written here; what a run before left is overwritten.
        sizes: of the run.
        seed: of weights, demonstrations, tasks and the order of the data.
        limit_seconds: no phase may take longer.
    """
    start = output / "start"
    warm = output / "sft" / f"global_step_{sizes.sft_steps}" / "huggingface"
    config = ["--config-path", str(RECIPE), "--config-name"]
    warm_up = [
        *("quickstart.warm_up", start, "--seed", seed, "--demonstrations", sizes.demonstrations, "--"),
        *(*config, "sft"),
        f"data.train_files={start / 'demonstrations.parquet'}",
        f"model.path={start / 'model'}",
        f"trainer.default_local_dir={output / 'sft'}",
        f"trainer.total_training_steps={sizes.sft_steps}",
        f"trainer.seed={seed}",
    ]
    grpo = [
        *("tree_rl.train", *config, "grpo"),
        f"data.train_files={start / 'tasks.parquet'}",
        f"data.val_files={start / 'tasks.parquet'}",
        f"data.train_batch_size={sizes.prompts}",
        f"data.seed={seed}",
        f"actor_rollout_ref.model.path={warm}",
        f"actor_rollout_ref.actor.ppo_mini_batch_size={sizes.prompts // sizes.updates}",
        f"actor_rollout_ref.rollout.custom.tree_dump_dir={output / 'trees'}",
        f"trainer.default_local_dir={output / 'grpo'}",
        f"trainer.total_training_steps={sizes.steps}",
    ]
    replay = ["quickstart.replay", warm, output / "trees", output / "replay.json", "--repeats", sizes.repeats]

    def phase(name: str, module: list[object], *, has_steps: bool = True, every: int = 1) -> Phase:
        metrics = output / f"{name}.jsonl" if has_steps else None
        return Phase(
            name=name,
            command=[sys.executable, "-m", *map(str, module)],
            log=output / f"{name}.log",
            limit_seconds=limit_seconds,
            metrics=metrics,
            every=every,
            environment={"VERL_FILE_LOGGER_PATH": str(metrics)} if metrics else None,
        )

    return [
        phase("warm-up", warm_up, every=SFT_LINE_EVERY),
        phase("grpo", grpo),
        phase("replay", replay, has_steps=False),
    ]


WHAT = {
    "warm-up": "demonstrations that really run their commands, then tree SFT through verl's SFT trainer",
    "grpo": "tree GRPO through verl.trainer.main_ppo (Ray starts its processes first, about 40 s)",
    "replay": "the same real batch as trees and as rows, in one process",
}


def run(output: Path, sizes: Sizes, *, seed: int, limit_seconds: float) -> None:
    """Run everything and print the table."""
    started = time.monotonic()
    output.mkdir(parents=True, exist_ok=True)
    for dump in (output / "trees").glob("*.jsonl"):
        dump.unlink()
    for phase in phases(output, sizes, seed=seed, limit_seconds=limit_seconds):
        say(phase.name, f"{WHAT[phase.name]}; log: {os.path.relpath(phase.log)}")
        run_phase(phase)
    # matplotlib is imported only now: the first line of progress must not wait for it.
    from quickstart.report import report

    report(output)
    print(f"{'total time':<34} {time.monotonic() - started:.0f} s")
    print(f"{'written':<34} {os.path.relpath(output / 'report.html')}")


def main() -> None:
    """Read the command line and run."""
    parser = argparse.ArgumentParser(prog="scripts/quickstart.sh", description=__doc__)
    parser.add_argument("--full", action="store_true", help="train longer")
    parser.add_argument("--output", type=Path, default=Path("outputs/quickstart"))
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--limit-seconds", type=float, default=1200, help="a phase that takes longer has failed")
    for field in fields(Sizes):
        name = field.name.replace("_", "-")
        parser.add_argument(
            f"--{name}", type=int, help=f"{getattr(SHORT, field.name)}; with --full {getattr(FULL, field.name)}"
        )
    given = parser.parse_args()
    chosen = {field.name: getattr(given, field.name) for field in fields(Sizes)}
    changed = {name: value for name, value in chosen.items() if value is not None}
    sizes = replace(FULL if given.full else SHORT, **changed)
    try:
        run(given.output.resolve(), sizes, seed=given.seed, limit_seconds=given.limit_seconds)
    except PhaseFailedError as error:
        fail(error)


if __name__ == "__main__":
    main()
