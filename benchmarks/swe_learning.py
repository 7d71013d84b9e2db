"""Learning curves of `recipes/swe_grpo` from one warm start: trees, verl's own rows, longest paths, estimators.

Agents reason before every turn and drop the reasoning from their history, so every turn of a session is a row. On a GPU
vLLM samples, and `--at-once` gives every arm a GPU of CUDA_VISIBLE_DEVICES, which `--arms-per-gpu` arms share. The CSV
grows with every step. A run that an earlier call ended is not run again; `--arms` without a name only warms up.

PYTHONPATH=. python benchmarks/swe_learning.py MODEL --at-once
PYTHONPATH=. python benchmarks/swe_learning.py MODEL --at-once --arms tree longest gigpo --seeds 0 1 2

In bf16 what is drawn depends on what else is in a batch, so arms part for that alone: `--arms tree flat flat_again`
shows how far, `--arms tree_float32 flat_float32` avoids it as far as float32 can.
"""

import argparse
import json
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from queue import SimpleQueue

from tree_rl.benchmark.provenance import provenance
from tree_rl.benchmark.results import write_csv
from tree_rl.inspection.files.run_log import read_steps

REPOSITORY = Path(__file__).resolve().parents[1]
RECIPES = REPOSITORY / "recipes"
sys.path[:0] = [str(REPOSITORY / "benchmarks"), str(RECIPES)]
from quickstart.progress import Phase, PhaseFailedError, run_phase, say  # noqa: E402
from swe_learning_figures import Drawn, measured  # noqa: E402
from swe_learning_overrides import (  # noqa: E402
    ARMS,
    ROLLOUTS,
    environment_of_arm,
    first_sessions,
    overrides_of,
    rows_folder,
    run_name,
)

MARK = "TREE_RL_SWE_LEARNING"
"""Variable by which the processes of a run are found."""
SECONDS_BETWEEN_CLUSTERS = 2.0
"""Ray looks for free ports before it takes them: clusters that start together may choose the same."""


def python_path() -> str:
    """Where every process finds the package and the tasks."""
    own = [str(REPOSITORY), *(str(REPOSITORY / name) for name in ("kernels", "benchmarks")), str(RECIPES)]
    own += [str(RECIPES / "swe_tasks")]
    own.append(os.environ.get("PYTHONPATH", ""))
    return os.pathsep.join(path for path in own if path)


def prepare_tasks(arguments: argparse.Namespace) -> None:
    """Write the tasks; without a model also a tiny random one."""
    _task_program("generate.py", str(arguments.output / "data"), "--train-tasks", str(arguments.tasks))
    if arguments.model is None:
        arguments.model = str(arguments.output / "model")
        _task_program("tiny_swe_model.py", arguments.model)


def _task_program(name: str, *rest: str) -> None:
    environment = os.environ | {"PYTHONPATH": python_path()}
    subprocess.run([sys.executable, str(RECIPES / "swe_tasks" / name), *rest], env=environment, check=True)


def left(arguments: argparse.Namespace, *, share: float) -> float:
    """Seconds that a phase may take: until the deadline, and at most that share of the time there was."""
    return min(arguments.deadline - (time.monotonic() - arguments.started), share * arguments.deadline)


def environment_of(arguments: argparse.Namespace, gpu: str | None) -> dict[str, str]:
    """Variables of a training process."""
    chosen = {} if gpu is None else {"CUDA_VISIBLE_DEVICES": gpu}
    return {
        "PYTHONPATH": python_path(),
        "PYTHON": sys.executable,
        "DEVICE": arguments.device,
        "SAVE_FREQ": "-1",
        "LOGGER": "",
        "TORCH_COMPILE_DISABLE": "1",
        "RAY_memory_monitor_refresh_ms": "0",
        **chosen,
    }


def warm_start(arguments: argparse.Namespace, gpu: str | None) -> Phase:
    """verl's SFT on the demonstrations, with a checkpoint every few steps."""
    metrics = arguments.output / "sft.jsonl"
    return Phase(
        name="sft",
        command=[
            *("bash", str(RECIPES / "sft" / "run_qwen3_fsdp2.sh")),
            "data.custom_cls.path=pkg://tree_rl.verl_plugin.sft.token_rows_dataset",
            "data.custom_cls.name=TokenRowsDataset",
            f"trainer.total_training_steps={arguments.sft_steps}",
            f"trainer.save_freq={arguments.sft_save}",
            f"trainer.seed={arguments.seeds[0]}",
            "trainer.logger=[console,file]",
            "checkpoint.save_contents=[hf_model]",
            "model.enable_gradient_checkpointing=false",
            "++model.override_config.attn_implementation=sdpa",
            "optim.lr_warmup_steps=5",
            *arguments.sft_override,
        ],
        log=arguments.output / "sft.log",
        limit_seconds=left(arguments, share=0.35),
        metrics=metrics,
        environment={
            **environment_of(arguments, gpu),
            "VERL_FILE_LOGGER_PATH": str(metrics),
            "MODEL_PATH": str(arguments.model),
            "TRAIN_FILE": str(arguments.output / "data" / "experts.parquet"),
            "OUTPUT": str(arguments.output / "sft"),
            "TRAIN_BATCH_SIZE": str(3 * arguments.tasks),
            "MAX_LENGTH": "4096",
            "EPOCHS": "100000",
            "LR": str(arguments.sft_lr),
        },
    )


def saved(arguments: argparse.Namespace) -> list[Path]:
    """Checkpoints of the warm start, in the order of training."""
    folders = (arguments.output / "sft" / "checkpoints").glob("global_step_*/huggingface")
    return sorted(folders, key=lambda path: int(path.parent.name.rpartition("_")[2]))


def choose_start(arguments: argparse.Namespace, gpu: str | None) -> None:
    """Play the reference repairs and warm the model up on them; start.json gets the checkpoint for RL, and shares."""
    rows = str(arguments.output / "data" / "experts.parquet")
    sandbox = json.dumps(arguments.sandbox)
    _task_program("experts.py", arguments.model, rows, "--tasks", str(arguments.tasks), "--think", "--sandbox", sandbox)
    try:
        run_phase(warm_start(arguments, gpu))
    except PhaseFailedError as error:
        if not saved(arguments):
            raise
        say("sft", f"goes on with what was saved: {error}")
    if not saved(arguments):
        raise SystemExit("expected checkpoints of a warm start, found none; see --sft-steps and --sft-save")
    looked = subprocess.run(
        [
            *(sys.executable, str(REPOSITORY / "benchmarks" / "swe_learning_start.py")),
            *(rows, str(arguments.start_at), *map(str, saved(arguments))),
        ],
        env=os.environ | environment_of(arguments, gpu),
        stdout=subprocess.PIPE,
        check=True,
    )
    (arguments.output / "start.json").write_bytes(looked.stdout)
    say("start", looked.stdout.decode().strip())


def run_to_the_end(phase: Phase) -> None:
    """Run a phase, then end what outlives it, such as a vLLM engine whose server was killed."""
    mark = f"{os.getpid()}-{phase.name}"
    try:
        run_phase(replace(phase, environment={**(phase.environment or {}), MARK: mark}))
    finally:
        wanted = f"{MARK}={mark}".encode()
        for folder in Path("/proc").glob("[0-9]*"):
            try:
                if wanted in (folder / "environ").read_bytes().split(b"\0"):
                    os.kill(int(folder.name), signal.SIGKILL)
            except OSError:
                continue


def own_cores(arguments: argparse.Namespace, gpu: str | None) -> list[str]:
    """Cores that an arm alone on its GPU keeps to; none where arms share a GPU, as they take turns with all cores."""
    every = sorted(os.sched_getaffinity(0))
    if not arguments.at_once or arguments.arms_per_gpu > 1 or arguments.device == "cpu":
        return []
    share, number = len(every) // len(arguments.gpus), arguments.gpus.index(gpu)
    return [str(core) for core in every[number * share : (number + 1) * share]]


def has_ended(arguments: argparse.Namespace, arm: str, seed: int) -> bool:
    """Whether an earlier call made all steps of a run."""
    steps = read_steps(arguments.output / f"{run_name(arm, seed)}.jsonl")
    return bool(steps) and steps[-1][0] >= arguments.steps


def run_arm(arguments: argparse.Namespace, arm: str, seed: int, place: tuple[int, str | None], model: str) -> None:
    """One run of the recipe from a model, in a cluster of its own: number of the cluster, and GPU."""
    number, gpu = place
    name = run_name(arm, seed)
    folder, metrics = arguments.output, arguments.output / f"{name}.jsonl"
    cores = own_cores(arguments, gpu)
    command = [
        *(sys.executable, str(REPOSITORY / "benchmarks" / "swe_learning_arm.py"), "--number", str(number)),
        *(["--cores", *cores] if cores else []),
        *("--", "bash", str(RECIPES / "swe_grpo" / "run_qwen3_fsdp2.sh")),
        *overrides_of(arguments, arm, seed),
    ]
    environment = {
        **environment_of(arguments, gpu),
        **environment_of_arm(arm, arguments.device),
        "VERL_FILE_LOGGER_PATH": str(metrics),
        "MODEL_PATH": model,
        "TRAIN_FILE": str(folder / "data" / "train.parquet"),
        "OUTPUT": str(folder / name),
        "MAX_TURNS": "3",
        "TURN_LENGTH": str(arguments.turn_tokens),
        "PROMPT_LENGTH": "768",
        "RESPONSE_LENGTH": "1280",
        "LR": str(arguments.lr),
        "STEPS": str(arguments.steps),
        "TRAIN_BATCH_SIZE": str(arguments.tasks),
        "MINI_BATCH_SIZE": str(arguments.tasks),
        "ROLLOUT_N": str(first_sessions(arm, arguments.sessions)),
        "MAX_TOKENS": str(arguments.max_tokens),
    }
    shutil.rmtree(rows_folder(arguments, arm, seed), ignore_errors=True)
    log, limit = folder / f"{name}.log", left(arguments, share=1.0)
    run_to_the_end(
        Phase(name=name, command=command, log=log, limit_seconds=limit, metrics=metrics, environment=environment)
    )


def parse() -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", nargs="?", default=None, help="folder; without one a tiny random model is trained")
    parser.add_argument("--output", type=Path, default=Path("outputs/swe_learning"))
    parser.add_argument("--csv", type=Path, default=Path("outputs/swe_learning.csv"))
    parser.add_argument("--arms", nargs="*", choices=list(ARMS), default=["tree", "flat", "longest"])
    parser.add_argument("--seeds", type=int, nargs="+", default=[0], help="of the arms; the first also warms up")
    parser.add_argument("--at-once", action="store_true", help="an arm on every GPU at a time")
    parser.add_argument("--arms-per-gpu", type=int, default=1, help="at a time")
    parser.add_argument("--rollout", choices=list(ROLLOUTS), default=None)
    parser.add_argument("--device", choices=("cpu", "gpu"), default="gpu")
    parser.add_argument("--commit", default=None)
    parser.add_argument("--deadline", type=float, default=7200.0, help="seconds after which the arms are stopped")
    for name, value in (("tasks", 16), ("sessions", 8), ("steps", 20), ("sft-steps", 28)):
        parser.add_argument(f"--{name}", type=int, default=value)
    for name, value in (("sft-save", 2), ("agent-workers", 4), ("turn-tokens", 256), ("max-tokens", 16384)):
        parser.add_argument(f"--{name}", type=int, default=value)
    for name, rate in (("sft-lr", 2e-4), ("lr", 4e-5), ("start-at", 0.2), ("session-seconds", 90.0)):
        parser.add_argument(f"--{name}", type=float, default=rate)
    parser.add_argument("--sandbox", type=json.loads, default={}, help="fields of SandboxOptions, as JSON")
    parser.add_argument("--override", nargs="*", default=[], help="of main_ppo")
    parser.add_argument("--sft-override", nargs="*", default=[])
    arguments = parser.parse_args()
    arguments.output, arguments.csv = arguments.output.resolve(), arguments.csv.resolve()
    arguments.started = time.monotonic()
    arguments.rollout = arguments.rollout or ("hf" if arguments.device == "cpu" else "vllm")
    arguments.gpus = [gpu for gpu in os.environ.get("CUDA_VISIBLE_DEVICES", "").split(",") if gpu] or [None]
    return arguments


def train(arguments: argparse.Namespace, model: str, made_by: Mapping[str, str]) -> bool:
    """Run the arms from a model; whether all came to their end. `made_by` are columns of the CSV."""
    drawn, runs = Drawn(), [(arm, seed) for seed in arguments.seeds for arm in arguments.arms]
    runs = [run for run in runs if not has_ended(arguments, *run)]
    workers = max(1, min(len(runs), len(arguments.gpus) * arguments.arms_per_gpu)) if arguments.at_once else 1
    free: SimpleQueue[tuple[int, str | None]] = SimpleQueue()
    for place in enumerate((arguments.gpus * arguments.arms_per_gpu)[:workers]):
        free.put(place)

    def run(arm: str, seed: int) -> bool:
        place, name = free.get(), run_name(arm, seed)
        if arguments.at_once:
            time.sleep(SECONDS_BETWEEN_CLUSTERS * place[0])
        try:
            say(name, f"starts on GPU {place[1]}, {left(arguments, share=1.0):.0f} s left")
            run_arm(arguments, arm, seed, place, model)
        except PhaseFailedError as error:
            say(name, str(error))
            return False
        finally:
            free.put(place)
        return True

    with ThreadPoolExecutor(workers) as threads:
        running = [threads.submit(run, *one) for one in runs]
        while not all(one.done() for one in running):
            time.sleep(3.0)
            write_csv(arguments.csv, measured(arguments, made_by, drawn))
    write_csv(arguments.csv, measured(arguments, made_by, drawn))
    ended = [one.result() for one in running]
    return all(ended)


def main() -> None:
    """Warm start, then the arms."""
    arguments = parse()
    arguments.output.mkdir(parents=True, exist_ok=True)
    made_by = provenance(commit=arguments.commit, packages=("torch", "transformers", "verl", "vllm", "ray"))
    prepare_tasks(arguments)
    if not (arguments.output / "start.json").exists():
        choose_start(arguments, arguments.gpus[0])
    model: str = json.loads((arguments.output / "start.json").read_text())["chosen"]
    raise SystemExit(0 if train(arguments, model, made_by) else 1)


if __name__ == "__main__":
    main()
