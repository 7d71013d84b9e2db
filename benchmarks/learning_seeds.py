"""Learning on the quickstart's task over several seeds: longest paths, estimators and branching policies against GRPO.

All runs start from one warm start; a seed decides the order of the tasks and what is drawn. Sessions drop their
reasoning, and every parallel command has a sub-agent. Two CPU cores. Runs that ended in a folder are not run again:
other sizes need another `--output`.

PYTHONPATH=.:recipes python benchmarks/learning_seeds.py --arms tree longest --seeds 0 1 2 3 4
"""

import argparse
import json
import os
import shutil
import sys
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

REPOSITORY = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(REPOSITORY / "benchmarks"), str(REPOSITORY / "recipes")]
from quickstart.progress import Phase, PhaseFailedError, run_phase, say  # noqa: E402
from quickstart.run import FULL, phases  # noqa: E402
from swe_learning_figures import Drawn, step_columns  # noqa: E402
from swe_learning_overrides import AGENT, CREDIT, ROLLOUT, first_sessions  # noqa: E402

from tree_rl.benchmark.provenance import provenance  # noqa: E402
from tree_rl.benchmark.results import write_csv  # noqa: E402
from tree_rl.verl_plugin.agent_loops.tool_agent_loop import as_gateway_agent  # noqa: E402

LIMIT_SECONDS = 7200.0


def warm_start(folder: Path, seed: int) -> Path:
    """The quickstart's model after SFT; made once.

    Args:
        folder: where the tasks and the model are kept.
        seed: decides weights, demonstrations and tasks.
    """
    model = folder / "sft" / f"global_step_{FULL.sft_steps}" / "huggingface"
    if not model.exists():
        run_phase(phases(folder, FULL, seed=seed, limit_seconds=LIMIT_SECONDS)[0])
    return model


def overrides_of(arguments: argparse.Namespace, arm: str, seed: int, model: Path) -> list[str]:
    """Overrides of the quickstart's `grpo.yaml` for a run from the weights of the warm start."""
    short = {
        "environment": "quickstart.task.StockEnvironment",
        "parallel_tools": "branches",
        "max_turns": 4,
        "max_turn_tokens": 112,
    }
    folder, tasks = run_folder(arguments, arm, seed), arguments.output / "start" / "start" / "tasks.parquet"
    return [
        f"data.train_files={tasks}",
        f"data.val_files={tasks}",
        f"data.train_batch_size={arguments.prompts}",
        f"data.seed={seed}",
        f"actor_rollout_ref.model.path={model}",
        f"actor_rollout_ref.actor.ppo_mini_batch_size={arguments.prompts}",
        "actor_rollout_ref.actor.calculate_entropy=true",
        f"{ROLLOUT}.n={first_sessions(arm, arguments.sessions)}",
        f"{ROLLOUT}.calculate_log_probs=true",
        # The agent of grpo.yaml in its long form, which sessions need to branch.
        f"{ROLLOUT}.agent.default_agent_loop=tree_gateway_agent",
        f"~{ROLLOUT}.custom.tree_agent",
        *(f"+{AGENT}.{key}={_as_hydra(value)}" for key, value in as_gateway_agent(short).items()),
        f"+{AGENT}.seed={seed}",
        f"{ROLLOUT}.custom.tree_dump_dir={folder / 'rows'}",
        f"trainer.default_local_dir={folder / 'checkpoints'}",
        f"trainer.total_training_steps={arguments.steps}",
        *CREDIT[arm],
    ]


def _as_hydra(value: Any) -> str:
    if isinstance(value, Mapping):
        return "{" + ", ".join(f"{key}: {_as_hydra(one)}" for key, one in value.items()) + "}"
    return json.dumps(value)


def run_one(arguments: argparse.Namespace, arm: str, seed: int, model: Path) -> bool:
    """One run from the weights of the warm start; whether it came to its end."""
    folder = run_folder(arguments, arm, seed)
    made_by = provenance(commit=arguments.commit, packages=("torch", "transformers", "verl"))
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    config = ["--config-path", str(REPOSITORY / "recipes" / "quickstart"), "--config-name", "grpo"]
    path = [*(str(REPOSITORY / name) for name in ("", "recipes")), os.environ.get("PYTHONPATH", "")]
    phase = Phase(
        name=folder.name,
        command=[sys.executable, "-m", "tree_rl.train", *config, *overrides_of(arguments, arm, seed, model)],
        log=folder / "log.txt",
        limit_seconds=LIMIT_SECONDS,
        metrics=folder / "steps.jsonl",
        environment={
            "PYTHONPATH": os.pathsep.join(path),
            "VERL_FILE_LOGGER_PATH": str(folder / "steps.jsonl"),
            "TORCH_COMPILE_DISABLE": "1",
            "OMP_WAIT_POLICY": "passive",
        },
    )
    try:
        run_phase(phase)
    except PhaseFailedError as error:
        say(folder.name, str(error))
        return False
    (folder / "made_by.json").write_text(json.dumps({**made_by, "cores": os.cpu_count()}))
    return True


def has_ended(arguments: argparse.Namespace, arm: str, seed: int) -> bool:
    """Whether a run has made all its steps."""
    return (run_folder(arguments, arm, seed) / "made_by.json").exists()


def run_folder(arguments: argparse.Namespace, arm: str, seed: int) -> Path:
    """Where a run keeps its files."""
    return arguments.output / f"{arm}_{seed}"


def measured(arguments: argparse.Namespace, runs: Sequence[tuple[str, int]]) -> list[dict[str, Any]]:
    """CSV rows of the runs that have ended: one for every step.

    `reward` is the mean over each prompt's first sessions, `unique_tokens` the tokens that the update runs.
    """
    lines, drawn = [], Drawn()
    for arm, seed in runs:
        if not has_ended(arguments, arm, seed):
            continue
        folder, first = run_folder(arguments, arm, seed), first_sessions(arm, arguments.sessions)
        made_by = json.loads((folder / "made_by.json").read_text())
        for _, columns in step_columns(folder / "steps.jsonl", folder / "rows", first, drawn):
            about = {"prompts": arguments.prompts, "first_sessions": first, **made_by}
            lines.append({"arm": arm, "seed": seed, **columns, **about})
    return lines


def main() -> None:
    """Warm start, then the runs, then the CSV."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--arms", nargs="+", choices=list(CREDIT), default=["tree", "longest"])
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2, 3, 4])
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--prompts", type=int, default=8, help="per step")
    parser.add_argument("--sessions", type=int, default=8, help="per prompt")
    parser.add_argument("--at-once", type=int, default=2, help="runs")
    parser.add_argument("--start-seed", type=int, default=0, help="of the warm start")
    parser.add_argument("--commit", default=None, help="to write beside figures; asked of git if left out")
    parser.add_argument("--output", type=Path, default=Path("outputs/learning_seeds"))
    parser.add_argument("--csv", type=Path, default=Path("outputs/learning_seeds.csv"))
    arguments = parser.parse_args()
    arguments.output = arguments.output.resolve()
    model = warm_start(arguments.output / "start", arguments.start_seed)
    runs = [(arm, seed) for seed in arguments.seeds for arm in arguments.arms]
    waiting = [run for run in runs if not has_ended(arguments, *run)]
    with ThreadPoolExecutor(arguments.at_once) as threads:
        ended = list(threads.map(lambda run: run_one(arguments, *run, model), waiting))
    write_csv(arguments.csv, measured(arguments, runs))
    raise SystemExit(0 if all(ended) else 1)


if __name__ == "__main__":
    main()
