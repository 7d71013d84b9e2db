"""The quickstart from start to end: prepare, warm start, GRPO, replay, report; one process each, noise in log files."""

import argparse
import os
import sys
import time
from dataclasses import dataclass
from pathlib import Path

from quickstart.progress import Metrics, Phase, PhaseFailedError, fail, run_phase, say

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

    def phase(name: str, module: list[object], describe: object = None) -> Phase:
        metrics = output / f"{name}.jsonl" if describe else None
        return Phase(
            name=name,
            command=[sys.executable, "-m", *map(str, module)],
            log=output / f"{name}.log",
            limit_seconds=settings.limit_seconds,
            metrics=metrics,
            describe=describe,
            environment={"VERL_FILE_LOGGER_PATH": str(metrics)} if metrics else None,
        )

    def describe_sft(step: int, metrics: Metrics) -> str | None:
        if step % SFT_LINE_EVERY and step != 1:
            return None
        return (
            f"step {step:3d}/{settings.sft_steps}  loss {metrics['train/loss']:.3f}  "
            f"tokens {metrics['tree/flat_tokens']:,.0f} -> {metrics['tree/unique_tokens']:,.0f}"
        )

    def describe_grpo(step: int, metrics: Metrics) -> str | None:
        if "tree/session_score/mean" not in metrics:
            return None
        reward = metrics["tree/session_score/mean"]
        return (
            f"step {step:2d}/{settings.steps}  reward {reward:.2f} {'█' * round(20 * reward):<20}  "
            f"tokens {metrics['tree/flat_tokens']:,.0f} -> {metrics['tree/unique_tokens']:,.0f}  "
            f"POR {metrics['tree/por']:.2f}  {metrics['timing_s/step']:.1f} s"
        )

    return [
        phase("prepare", prepare),
        phase("sft", sft, describe_sft),
        phase("grpo", grpo, describe_grpo),
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
    from quickstart.report import print_table, report

    summary = report(settings.output, settings.seed)
    print_table(summary)
    print(f"\n{'total time':<34} {time.monotonic() - started:.0f} s")
    for name in ("report.html", "report.png"):
        print(f"{'written':<34} {os.path.relpath(settings.output / name)}")
    print(f"{'next':<34} tree-rl report {os.path.relpath(settings.output)}")


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
