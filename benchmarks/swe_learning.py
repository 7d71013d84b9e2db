"""Learning curves of `recipes/swe_grpo`: trees, verl's own rows, longest paths, from one warm start and one seed.

Agents reason before every turn and drop the reasoning from their history, so every turn of a session is a row. On a GPU
vLLM samples, and `--at-once` gives every arm a GPU of CUDA_VISIBLE_DEVICES. The CSV grows with every step.

PYTHONPATH=. python benchmarks/swe_learning.py MODEL --at-once --check-rollouts
"""

import argparse
import csv
import json
import os
import subprocess
import sys
import threading
import time
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from tree_rl.benchmark.provenance import provenance

REPOSITORY = Path(__file__).resolve().parents[1]
RECIPES = REPOSITORY / "recipes"
sys.path.insert(0, str(RECIPES))
from quickstart.progress import Phase, PhaseFailedError, read_steps, reward_of_step, run_phase, say  # noqa: E402

ACTOR = "actor_rollout_ref.actor"
ROLLOUT = "actor_rollout_ref.rollout"
AGENT = f"{ROLLOUT}.custom.gateway_agent"
ARMS: Mapping[str, Sequence[str]] = {
    "tree": ["algorithm.adv_estimator=full_tree"],
    "flat": [
        "algorithm.adv_estimator=full_tree",
        "actor_rollout_ref.model.model_type=language_model",
        f"{ACTOR}.fsdp_config._target_=verl.workers.config.FSDPEngineConfig",
        f"~{ACTOR}.fsdp_config.tree",
        # Its attention without flash-attn masks whole batches: smaller ones are faster.
        f"{ACTOR}.ppo_max_token_len_per_gpu=8192",
    ],
    "longest": ["algorithm.adv_estimator=longest_path"],
}
ROLLOUTS: Mapping[str, Sequence[str]] = {
    # The GPU has room for trainer and server at a time, so neither sleeps.
    "vllm": [
        f"{ROLLOUT}.name=vllm",
        f"{ROLLOUT}.enforce_eager=true",
        f"{ROLLOUT}.free_cache_engine=false",
        f"++{ROLLOUT}.enable_sleep_mode=false",
        f"{ROLLOUT}.gpu_memory_utilization=0.3",
    ],
    "vllm_sleep": [f"{ROLLOUT}.name=vllm", f"{ROLLOUT}.enforce_eager=true", f"{ROLLOUT}.gpu_memory_utilization=0.3"],
    "hf": [f"{ROLLOUT}.name=hf", f"{ROLLOUT}.free_cache_engine=false"],
}
FIGURES: Mapping[str, str] = {
    "reward": "tree/session_score/mean",
    "sessions": "tree/sessions",
    "rows_per_session": "tree/paths_per_session/mean",
    "flat_tokens": "tree/flat_tokens",
    "unique_tokens": "tree/unique_tokens",
    "gradient_norm": "actor/grad_norm",
    "policy_loss": "actor/pg_loss",
    "entropy": "actor/entropy",
    "step_s": "timing_s/step",
    "rollout_s": "timing_s/gen",
    "log_probs_s": "timing_s/old_log_prob",
    "update_s": "timing_s/update_actor",
    "weights_s": "timing_s/update_weights",
    "rollout_prob_error_max": "training/rollout_probs_diff_max",
    "rollout_prob_error_mean": "training/rollout_probs_diff_mean",
    "rollout_kl": "rollout_corr/kl",
    "self_check_error": "tree/self_check_error",
    "memory_gb": "actor/perf/max_memory_allocated_gb",
}


def python_path() -> str:
    """Where every process finds the package and the tasks."""
    own = [str(REPOSITORY), str(REPOSITORY / "kernels"), str(RECIPES / "swe_tasks"), os.environ.get("PYTHONPATH", "")]
    return os.pathsep.join(path for path in own if path)


def prepare_tasks(arguments: argparse.Namespace) -> None:
    """Write the tasks; without a model also a tiny random one."""
    _task_program("generate.py", str(arguments.output / "data"), "--train-tasks", str(arguments.tasks))
    if arguments.model is None:
        arguments.model = str(arguments.output / "model")
        _task_program("tiny_model.py", arguments.model)


def demonstrate(arguments: argparse.Namespace) -> None:
    """Play the reference repairs, in sandboxes, and write their rows."""
    rows = str(arguments.output / "data" / "experts.parquet")
    sandbox = json.dumps(arguments.sandbox)
    _task_program("experts.py", arguments.model, rows, "--tasks", str(arguments.tasks), "--think", "--sandbox", sandbox)


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
            "data.custom_cls.path=pkg://tree_rl.verl_plugin.token_rows_dataset",
            "data.custom_cls.name=TokenRowsDataset",
            f"trainer.total_training_steps={arguments.sft_steps}",
            f"trainer.save_freq={arguments.sft_save}",
            f"trainer.seed={arguments.seed}",
            "trainer.logger=[console,file]",
            "checkpoint.save_contents=[hf_model]",
            "model.enable_gradient_checkpointing=false",
            "++model.override_config.attn_implementation=sdpa",
            "optim.lr_warmup_steps=5",
            *arguments.sft_override,
        ],
        log=arguments.output / "sft.log",
        limit_seconds=left(arguments, share=0.4),
        metrics=metrics,
        describe=lambda step, figures: f"step {step:3d}  loss {figures.get('train/loss', float('nan')):.4f}",
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


def choose_start(arguments: argparse.Namespace, gpu: str | None) -> None:
    """Write to start.json the checkpoint that RL begins with, and what the others would have been."""
    saved = (arguments.output / "sft" / "checkpoints").glob("global_step_*/huggingface")
    folders = sorted(saved, key=lambda path: int(path.parent.name.rpartition("_")[2]))
    looked = subprocess.run(
        [
            *(sys.executable, str(REPOSITORY / "benchmarks" / "swe_learning_start.py")),
            *(str(arguments.output / "data" / "experts.parquet"), str(arguments.start_at), *map(str, folders)),
        ],
        env=os.environ | environment_of(arguments, gpu),
        stdout=subprocess.PIPE,
        check=True,
    )
    (arguments.output / "start.json").write_bytes(looked.stdout)
    say("start", looked.stdout.decode().strip())


def run_arm(
    arguments: argparse.Namespace, name: str, place: tuple[int, str | None], *, model: str, rollout: str, **sizes: str
) -> None:
    """One run of the recipe in a cluster of its own.

    Args:
        arguments: of the command line.
        name: an arm, or `check_` and an arm.
        place: number of the cluster, and GPU.
        model: that it begins with.
        rollout: one of `ROLLOUTS`.
        sizes: variables of the recipe.
    """
    number, gpu = place
    folder, metrics = arguments.output, arguments.output / f"{name}.jsonl"
    every = sorted(os.sched_getaffinity(0))
    share = len(every) // len(arguments.gpus) if arguments.at_once and arguments.device == "gpu" else 0
    cores = [str(core) for core in every[number * share : (number + 1) * share]]
    settled = ["~ray_kwargs.ray_init.num_gpus", "~ray_kwargs.ray_init.include_dashboard"]
    command = [
        *(sys.executable, str(REPOSITORY / "benchmarks" / "swe_learning_arm.py"), "--number", str(number)),
        *(["--cores", *cores] if cores else []),
        *("--", "bash", str(RECIPES / "swe_grpo" / "run_qwen3_fsdp2.sh")),
        *ARMS[name.removeprefix("check_")],
        *ROLLOUTS[rollout],
        *(settled if arguments.device == "cpu" else []),
        "ray_kwargs.ray_init.num_cpus=null",
        f"{ROLLOUT}.calculate_log_probs=true",
        f"{ROLLOUT}.agent.num_workers={arguments.agent_workers}",
        f"++{ROLLOUT}.custom.tree_dump_dir={folder / f'{name}_rows'}",
        f"+{AGENT}.seed={arguments.seed}",
        f"+{AGENT}.agent_options.options.think=strip",
        f"+{AGENT}.gateway.reasoning=inline",
        "reward.num_workers=1",
        "transfer_queue.backend.SimpleStorage.num_data_storage_units=1",
        "data.dataloader_num_workers=0",
        f"data.seed={arguments.seed}",
        "actor_rollout_ref.model.enable_gradient_checkpointing=false",
        "++actor_rollout_ref.model.override_config.attn_implementation=sdpa",
        f"{ACTOR}.use_torch_compile=false",
        f"{ACTOR}.fsdp_config.use_torch_compile=false",
        f"{ACTOR}.calculate_entropy=true",
        "trainer.logger=[console,file]",
        "trainer.resume_mode=disable",
        *(f"+{AGENT}.agent_options.sandbox.{key}={json.dumps(value)}" for key, value in arguments.sandbox.items()),
        *arguments.override,
    ]
    run_phase(
        Phase(
            name=name,
            command=command,
            log=folder / f"{name}.log",
            limit_seconds=left(arguments, share=0.3 if name.startswith("check_") else 1.0),
            metrics=metrics,
            describe=reward_of_step,
            environment={
                **environment_of(arguments, gpu),
                # verl lists its own engine for accelerators alone; under this name it runs on the CPU all the same.
                **({"VERL_ENGINE_DEVICE": "cuda"} if "flat" in name and arguments.device == "cpu" else {}),
                "VERL_FILE_LOGGER_PATH": str(metrics),
                "MODEL_PATH": model,
                "TRAIN_FILE": str(folder / "data" / "train.parquet"),
                "OUTPUT": str(folder / name),
                "MAX_TURNS": "3",
                "TURN_LENGTH": str(arguments.turn_tokens),
                "PROMPT_LENGTH": "768",
                "RESPONSE_LENGTH": "1280",
                "LR": str(arguments.lr),
                **sizes,
            },
        )
    )


def check_rollouts(arguments: argparse.Namespace) -> str | None:
    """One small step of every way to roll out, on the GPUs beside the warm start; the first that works, or None."""
    waiting = [("vllm", "check_tree"), ("vllm_sleep", "check_flat")]
    sizes = {"STEPS": "1", "TRAIN_BATCH_SIZE": "2", "MINI_BATCH_SIZE": "2", "ROLLOUT_N": "2", "MAX_TURNS": "2"}
    places = [(10 + index, gpu) for index, gpu in enumerate(arguments.gpus[1:] or arguments.gpus)]

    def works(rollout: str, name: str, place: tuple[int, str | None]) -> bool:
        try:
            run_arm(arguments, name, place, model=str(arguments.model), rollout=rollout, **sizes)
        except PhaseFailedError as error:
            say(name, f"{rollout} does not work here: {error}")
        return bool(read_steps(arguments.output / f"{name}.jsonl"))

    with ThreadPoolExecutor(len(waiting)) as threads:
        tried = [
            (rollout, threads.submit(works, rollout, name, place))
            for (rollout, name), place in zip(waiting, places, strict=False)
        ]
    return next((rollout for rollout, done in tried if done.result()), None)


def rollouts(folder: Path, arm: str) -> dict[int, list[str]]:
    """What was rolled out: step -> the rows, token for token."""
    found: dict[int, list[str]] = {}
    for path in sorted((folder / f"{arm}_rows").glob("train-*.jsonl")):
        for line in path.read_text().split("\n")[:-1]:
            row = json.loads(line)
            found.setdefault(row["step"], []).append(str((row["prompt_ids"], row["response_ids"])))
    return found


def measured(arguments: argparse.Namespace, made_by: Mapping[str, str], rollout: str) -> list[dict[str, Any]]:
    """CSV rows of all steps so far; `rows_as_in_tree_arm` counts rows that the tree arm drew too, in the same step."""
    lines: list[dict[str, Any]] = []
    reference = rollouts(arguments.output, "tree")
    for arm in arguments.arms:
        mine = rollouts(arguments.output, arm)
        for step, figures in read_steps(arguments.output / f"{arm}.jsonl"):
            if FIGURES["reward"] not in figures:
                continue
            drawn, others = mine.get(step, []), list(reference.get(step, []))
            same = sum(min(drawn.count(row), others.count(row)) for row in set(drawn))
            line: dict[str, Any] = {"seed": arguments.seed, "arm": arm, "step": step}
            line |= {key: f"{figures[name]:.6g}" if name in figures else "" for key, name in FIGURES.items()}
            lines.append({**line, "rows": len(drawn), "rows_as_in_tree_arm": same, "rollout": rollout, **made_by})
    return lines


def write(path: Path, lines: Sequence[Mapping[str, Any]]) -> None:
    """Replace the CSV, whole."""
    if lines:
        path.parent.mkdir(parents=True, exist_ok=True)
        with path.with_suffix(".new").open("w", newline="") as file:
            writer = csv.DictWriter(file, list(lines[0]))
            writer.writeheader()
            writer.writerows(lines)
        path.with_suffix(".new").replace(path)


def parse() -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", nargs="?", default=None, help="folder; without one a tiny random model is trained")
    parser.add_argument("--output", type=Path, default=Path("outputs/swe_learning"))
    parser.add_argument("--csv", type=Path, default=Path("outputs/swe_learning.csv"))
    parser.add_argument("--arms", nargs="*", choices=list(ARMS), default=list(ARMS))
    parser.add_argument("--at-once", action="store_true", help="every arm on a GPU of its own, at the same time")
    parser.add_argument("--check-rollouts", action="store_true", help="try vLLM beside the warm start")
    parser.add_argument("--rollout", choices=list(ROLLOUTS), default=None)
    parser.add_argument("--device", choices=("cpu", "gpu"), default="gpu")
    parser.add_argument("--commit", default=None)
    parser.add_argument("--deadline", type=float, default=7200.0, help="seconds after which the arms are stopped")
    for name, value in (("seed", 0), ("tasks", 16), ("sessions", 8), ("steps", 20), ("sft-steps", 120)):
        parser.add_argument(f"--{name}", type=int, default=value)
    for name, value in (("sft-save", 8), ("agent-workers", 4), ("turn-tokens", 256), ("max-tokens", 16384)):
        parser.add_argument(f"--{name}", type=int, default=value)
    for name, rate in (("sft-lr", 2e-4), ("lr", 4e-5), ("start-at", 0.25)):
        parser.add_argument(f"--{name}", type=float, default=rate)
    parser.add_argument("--sandbox", type=json.loads, default={}, help="fields of SandboxOptions, as JSON")
    parser.add_argument("--override", nargs="*", default=[], help="of main_ppo")
    parser.add_argument("--sft-override", nargs="*", default=[])
    arguments = parser.parse_args()
    arguments.output, arguments.csv = arguments.output.resolve(), arguments.csv.resolve()
    arguments.started = time.monotonic()
    arguments.gpus = [gpu for gpu in os.environ.get("CUDA_VISIBLE_DEVICES", "").split(",") if gpu] or [None]
    return arguments


def train(arguments: argparse.Namespace, model: str, rollout: str, made_by: Mapping[str, str]) -> bool:
    """Run the arms; whether all came to their end."""
    sizes = {
        "STEPS": str(arguments.steps),
        "TRAIN_BATCH_SIZE": str(arguments.tasks),
        "ROLLOUT_N": str(arguments.sessions),
    }
    sizes |= {"MINI_BATCH_SIZE": str(arguments.tasks), "MAX_TOKENS": str(arguments.max_tokens)}
    failed: list[str] = []

    def run(number: int, arm: str) -> None:
        place = (number, arguments.gpus[number % len(arguments.gpus)])
        try:
            run_arm(arguments, arm, place, model=model, rollout=rollout, **sizes)
        except PhaseFailedError as error:
            failed.append(arm)
            say(arm, str(error))

    with ThreadPoolExecutor(len(arguments.arms) if arguments.at_once else 1) as threads:
        running = [threads.submit(run, number, arm) for number, arm in enumerate(arguments.arms)]
        while not all(one.done() for one in running):
            time.sleep(3.0)
            write(arguments.csv, measured(arguments, made_by, rollout))
    for one in running:
        one.result()
    write(arguments.csv, measured(arguments, made_by, rollout))
    return not failed


def main() -> None:
    """Warm start, checks beside it, arms."""
    arguments = parse()
    arguments.output.mkdir(parents=True, exist_ok=True)
    made_by = provenance(commit=arguments.commit, packages=("torch", "transformers", "verl", "vllm", "ray"))
    prepare_tasks(arguments)
    checked: list[str | None] = [None]

    def check() -> None:
        checked[0] = check_rollouts(arguments)

    beside = threading.Thread(target=check) if arguments.check_rollouts else None
    if beside:
        beside.start()
    if not (arguments.output / "start.json").exists():
        demonstrate(arguments)
        run_phase(warm_start(arguments, arguments.gpus[0]))
        choose_start(arguments, arguments.gpus[0])
    model: str = json.loads((arguments.output / "start.json").read_text())["chosen"]
    if beside:
        beside.join()
    rollout = (
        arguments.rollout or checked[0] or ("hf" if arguments.check_rollouts or arguments.device == "cpu" else "vllm")
    )
    say("rollout", rollout)
    raise SystemExit(0 if train(arguments, model, rollout, made_by) else 1)


if __name__ == "__main__":
    main()
