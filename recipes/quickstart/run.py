"""The quickstart from start to end: prepare, warm start, GRPO, replay, report; one process each, noise in log files."""

import argparse
import os
import sys
import time
from dataclasses import dataclass
from pathlib import Path

from quickstart.progress import Phase, PhaseFailedError, fail, run_phase, say

RECIPE = Path(__file__).parent
SFT_LINE_EVERY = 40


@dataclass(frozen=True, kw_only=True, slots=True)
class Settings:
    """What a user may change."""

    output: Path
    """Everything is written here; what a run before left is overwritten."""
    seed: int
    demonstrations: int
    """Sessions that the experts show."""
    sft_steps: int
    steps: int
    """GRPO steps."""
    limit_seconds: float
    """No phase may take longer."""


def phases(settings: Settings) -> list[Phase]:
    """List the quickstart's processes, in order."""
    output, start = settings.output, settings.output / "start"
    warm = output / "sft" / f"global_step_{settings.sft_steps}" / "huggingface"
    config = ["--config-path", str(RECIPE), "--config-name"]
    prepare = ["quickstart.prepare", start, "--seed", settings.seed, "--demonstrations", settings.demonstrations]
    sft = [
        *("tree_rl.sft", *config, "sft"),
        f"data.train_files={start / 'demonstrations.parquet'}",
        f"model.path={start / 'model'}",
        f"trainer.default_local_dir={output / 'sft'}",
        f"trainer.total_training_steps={settings.sft_steps}",
        f"trainer.seed={settings.seed}",
    ]
    grpo = [
        *("tree_rl.train", *config, "grpo"),
        f"data.train_files={start / 'tasks.parquet'}",
        f"data.val_files={start / 'tasks.parquet'}",
        f"data.seed={settings.seed}",
        f"actor_rollout_ref.model.path={warm}",
        f"actor_rollout_ref.rollout.custom.tree_dump_dir={output / 'trees'}",
        f"trainer.default_local_dir={output / 'grpo'}",
        f"trainer.total_training_steps={settings.steps}",
    ]

    def phase(name: str, module: list[object], *, has_steps: bool = False, every: int = 1) -> Phase:
        metrics = output / f"{name}.jsonl" if has_steps else None
        return Phase(
            name=name,
            command=[sys.executable, "-m", *map(str, module)],
            log=output / f"{name}.log",
            limit_seconds=settings.limit_seconds,
            metrics=metrics,
            every=every,
            environment={"VERL_FILE_LOGGER_PATH": str(metrics)} if metrics else None,
        )

    return [
        phase("prepare", prepare),
        phase("sft", sft, has_steps=True, every=SFT_LINE_EVERY),
        phase("grpo", grpo, has_steps=True),
        phase("replay", ["quickstart.replay", warm, output / "trees", output / "replay.json"]),
    ]


WHAT = {
    "prepare": "tokenizer, untrained model, demonstrations that really run their commands",
    "sft": "warm start: tree SFT through verl's SFT trainer",
    "grpo": "tree GRPO through verl.trainer.main_ppo (Ray starts its processes first, about 40 s)",
    "replay": "the same real batch as trees and as rows, in one process",
}


def run(settings: Settings) -> None:
    """Run everything and print the table."""
    started = time.monotonic()
    settings.output.mkdir(parents=True, exist_ok=True)
    for dump in (settings.output / "trees").glob("*.jsonl"):
        dump.unlink()
    for phase in phases(settings):
        say(phase.name, f"{WHAT[phase.name]}; log: {os.path.relpath(phase.log)}")
        run_phase(phase)
    # matplotlib and the tokenizer are imported only now: the first line of progress must not wait for them.
    from quickstart.report import report

    report(settings.output)
    print(f"\n{'total time':<34} {time.monotonic() - started:.0f} s")
    print(f"{'written':<34} {os.path.relpath(settings.output / 'report.html')}")


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--output", type=Path, default=Path("outputs/quickstart"))
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--demonstrations", type=int, default=1500)
    parser.add_argument("--sft-steps", type=int, default=420)
    parser.add_argument("--steps", type=int, default=25)
    parser.add_argument("--limit-seconds", type=float, default=1200)
    arguments = vars(parser.parse_args())
    arguments["output"] = arguments["output"].resolve()
    try:
        run(Settings(**arguments))
    except PhaseFailedError as error:
        fail(error)
