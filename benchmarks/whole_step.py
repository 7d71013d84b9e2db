"""Whole steps of GRPO, stock verl against tree_rl: rollout, log-probs, update, weights, waiting, idle GPUs, memory.

Sessions follow recorded turn lengths, so both arms generate, and train on, as many tokens. Model, tokenizer and prompts
are made on the machine.

PYTHONPATH=. python benchmarks/whole_step.py --gpus 4 --model 8b --por 0.5 0.9 --update-ratio 0.5=1.9 0.9=10.2

Runs of one --output add up, so arms and overlaps may run in several calls. Arms follow each other: two jobs with vLLM
on one host would share verl's sockets. The arm `vllm` plays the sessions on vLLM alone, on one GPU: no verl, no Ray.

With `--apart N` both arms run as verl's separate async trainer: N of the GPUs roll out, the others train. A step then
trains the sessions of the step before it, and rolls out the next ones meanwhile.
"""

import argparse
import json
import os
import statistics
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from tree_rl.benchmark.provenance import provenance
from tree_rl.benchmark.results import write_csv
from tree_rl.cost.model_sizes import MODEL_SIZES
from tree_rl.inspection.files.run_log import read_steps

REPOSITORY = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(REPOSITORY / "benchmarks"), str(REPOSITORY / "recipes")]
from quickstart.progress import Phase  # noqa: E402
from scripted_steps.arms import (  # noqa: E402
    ARMS,
    STOCK,
    TREE,
    environment_of,
    overrides_of,
    steps_of,
    stock_attention,
    vllm_settings,
)
from scripted_steps.gpu_watch import watched  # noqa: E402
from scripted_steps.inputs import save_inputs  # noqa: E402
from scripted_steps.processes import python_path, run_to_the_end  # noqa: E402
from scripted_steps.scripted_agent_loop import STAMPS  # noqa: E402
from scripted_steps.session_scripts import Script, script_with_overlap, tool_seconds_of  # noqa: E402
from scripted_steps.step_parts import COUNTS, PARTS, UPDATE, amdahl, have_ended, read_stamps, step_rows, summary  # noqa: E402

LEAST_OF_AMDAHL = 0.9
"""Target: speed-up of whole steps over what Amdahl's law gives."""
ALONE = "vllm"
"""The arm without a trainer."""
ROUNDS = "rounds.jsonl"
PACKAGES = ("torch", "triton", "transformers", "verl", "vllm", "ray", "flash-attn", "flash-attn-4", "liger-kernel")


def parse(given: Sequence[str] | None = None) -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--output", type=Path, default=Path("outputs/whole_step"))
    parser.add_argument("--csv", type=Path, default=Path("outputs/whole_step.csv"))
    parser.add_argument("--gpus", type=int, default=1, help="0 runs a tiny model on the CPU, without vLLM")
    parser.add_argument("--apart", type=int, default=0, help="GPUs that roll out while the others train; 0: in turns")
    parser.add_argument("--model", choices=list(MODEL_SIZES), default="8b")
    parser.add_argument("--layers", type=int, default=None, help="all by default")
    parser.add_argument("--por", type=float, nargs="+", default=[0.5, 0.9])
    parser.add_argument("--arms", nargs="+", choices=(*ARMS, ALONE), default=list(ARMS))
    parser.add_argument("--prompts", type=int, default=8, help="of a step")
    parser.add_argument("--sessions", type=int, default=4, help="of a prompt")
    parser.add_argument("--scale", type=float, default=1.0, help="factor on the recorded lengths")
    parser.add_argument("--turns", type=int, default=None, help="most turns of a session; all by default")
    parser.add_argument(
        "--single-turn",
        type=int,
        nargs=2,
        default=None,
        metavar=("PROMPT", "REPLY"),
        help="tokens of sessions of one turn, in place of recorded ones; --por follows",
    )
    parser.add_argument("--steps", type=int, default=5, help="that are measured")
    parser.add_argument("--warm-up", type=int, default=1, help="steps before those")
    parser.add_argument("--warm-up-turns", type=int, default=None, help="most turns of a session in those; as --turns")
    parser.add_argument("--max-tokens", type=int, default=None, help="of a micro-batch, both arms")
    parser.add_argument(
        "--tool-seconds",
        type=float,
        nargs="+",
        default=[0.0],
        help="that every tool call of a session takes; of several, measured steps take one after the other",
    )
    parser.add_argument("--eager", action="store_true", help="vLLM without CUDA graphs and without torch.compile")
    parser.add_argument("--liger", action="store_true", help="fused layers in both arms")
    parser.add_argument("--update-ratio", nargs="*", default=[], help="POR=RATIO of one GPU's update, for Amdahl's law")
    parser.add_argument("--deadline", type=float, default=3600.0, help="seconds of one run")
    parser.add_argument("--commit", default=None)
    parser.add_argument("--override", nargs="*", default=[], help="of main_ppo, both arms")
    arguments = parser.parse_args(given)
    if arguments.single_turn:
        arguments.por = [round(script_with_overlap(**script_arguments(arguments, 0.0)).por, 3)]
    arguments.output, arguments.csv = arguments.output.resolve(), arguments.csv.resolve()
    if arguments.gpus and arguments.apart >= arguments.gpus:
        parser.error(f"--apart {arguments.apart}: expected fewer GPUs than --gpus {arguments.gpus}, for the trainer")
    latencies = " ".join(f"{seconds:g}" for seconds in arguments.tool_seconds)
    if len(arguments.tool_seconds) > arguments.steps:
        parser.error(f"--tool-seconds {latencies}: expected no more of them than --steps {arguments.steps}")
    if arguments.apart and len(arguments.tool_seconds) > 1:
        parser.error(f"--tool-seconds {latencies}: expected one with --apart, where prompts of several steps mix")
    # Apart, the first two batches are drawn in the first step.
    arguments.unmeasured = arguments.warm_up + bool(arguments.apart)
    arguments.ratios = {float(por): float(ratio) for por, ratio in (one.split("=") for one in arguments.update_ratio)}
    return arguments


def script_arguments(arguments: argparse.Namespace, por: float) -> dict[str, Any]:
    """Arguments of `script_with_overlap`."""
    lengths = {"scale": arguments.scale, "turns": arguments.turns, "single_turn": arguments.single_turn}
    return {"por": por, "groups": arguments.prompts, "sessions": arguments.sessions, **lengths}


def session_settings(arguments: argparse.Namespace, por: float) -> dict[str, Any]:
    """What plays a session needs, in verl's agent loop and on vLLM alone."""
    vocab = MODEL_SIZES[arguments.model].shape.vocab
    warm_up = {"steps": arguments.warm_up, "turns": arguments.warm_up_turns}
    tools = {"tool_seconds": arguments.tool_seconds, "unmeasured": arguments.unmeasured}
    return {"script": script_arguments(arguments, por), "vocab": vocab, "warm_up": warm_up, **tools}


def run_folder(arguments: argparse.Namespace, arm: str, por: float) -> Path:
    """What a run leaves."""
    return arguments.output / f"{arm}_{por:g}{'_apart' if arguments.apart else ''}"


def layers_of(arguments: argparse.Namespace) -> int:
    """Layers of the model, all by default."""
    return MODEL_SIZES[arguments.model].with_layers(arguments.layers).shape.layers


def random_model(arguments: argparse.Namespace) -> Path:
    """The folder of the model, which is written if it is not there."""
    layers = layers_of(arguments)
    folder: Path = arguments.output / f"model_{arguments.model}_{layers}"
    if not (folder / "tokenizer.json").exists():
        command = [sys.executable, "-m", "scripted_steps.inputs", arguments.model, str(layers), str(folder)]
        subprocess.run(command, env=os.environ | {"PYTHONPATH": python_path()}, check=True)
    return folder


def play_alone(arguments: argparse.Namespace, por: float) -> None:
    """Play the sessions on vLLM alone, as often as the other arms do."""
    folder = run_folder(arguments, ALONE, por)
    folder.mkdir(parents=True, exist_ok=True)
    settings, rounds = folder / "settings.json", arguments.warm_up + arguments.steps
    engine = vllm_settings(random_model(arguments), eager=arguments.eager)
    own = {"engine": engine, "rounds": rounds, "unmeasured": arguments.warm_up}
    settings.write_text(json.dumps(session_settings(arguments, por) | own))
    command = [sys.executable, "-m", "scripted_steps.vllm_alone", str(settings), str(folder / ROUNDS)]
    subprocess.run(command, env=os.environ | {"PYTHONPATH": python_path()}, check=True, timeout=arguments.deadline)


def alone_per_second(arguments: argparse.Namespace, por: float, tool_seconds: float) -> float | None:
    """Median of the tokens a second of vLLM alone, without the warm-up; None if it did not run."""
    path = run_folder(arguments, ALONE, por) / ROUNDS
    if not path.exists():
        return None
    rounds = [json.loads(line) for line in path.read_text().splitlines()][arguments.warm_up :]
    rates = [one["generated_tokens"] / one["rollout_s"] for one in rounds if one["tool_seconds"] == tool_seconds]
    return statistics.median(rates) if rates else None


def gpu_numbers(gpus: int) -> list[int]:
    """Numbers of the first GPUs that this process may use."""
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    return [int(number) for number in visible.split(",")][:gpus] if visible else list(range(gpus))


def is_whole(folder: Path, step: int) -> bool:
    """Whether the step's metrics are written, its sessions have ended, which may come later apart, and one of the next
    has started, which may come first.
    """
    has_metrics = any(found == step for found, _ in read_steps(folder / "metrics.jsonl"))
    stamps = read_stamps(folder)
    return has_metrics and have_ended(stamps[step]) and any("started" in one for one in stamps[step + 1])


def play(arguments: argparse.Namespace, arm: str, por: float) -> None:
    """Run one arm on one script."""
    folder, script = run_folder(arguments, arm, por), script_with_overlap(**script_arguments(arguments, por))
    save_inputs(folder, arguments.prompts, session_settings(arguments, por))
    overrides = overrides_of(arguments, arm, script, folder, random_model(arguments))
    stamps = folder / "stamps"
    stamps.mkdir(exist_ok=True)
    for old in stamps.iterdir():
        old.unlink()
    environment = {
        "PYTHONPATH": python_path(),
        "VERL_FILE_LOGGER_PATH": str(folder / "metrics.jsonl"),
        "RAY_memory_monitor_refresh_ms": "0",
        STAMPS: str(stamps),
        **environment_of(arm, arguments.gpus),
    }
    phase = Phase(
        name=folder.name,
        command=[sys.executable, "-m", "verl.trainer.main_ppo", *overrides],
        log=folder / "log.txt",
        limit_seconds=arguments.deadline,
        metrics=folder / "metrics.jsonl",
        environment=environment,
        seen_enough=lambda: is_whole(folder, steps_of(arguments) - 1),
    )
    with watched(folder / "gpus.jsonl", gpu_numbers(arguments.gpus)):
        run_to_the_end(phase)


def refuse_other_work(rows: Sequence[Mapping[str, Any]], script: Script, name: str) -> None:
    """Check that every measured step did the script's work.

    Raises:
        ValueError: a step generated, or trained on, something else.
    """
    wanted = {count: getattr(script, count) for count in COUNTS}
    for row in rows:
        received = {count: row[count] for count in COUNTS}
        if received != wanted:
            raise ValueError(f"{name}, step {row['step']}: expected {wanted}, received {received}")


def report(arguments: argparse.Namespace, made_by: Mapping[str, str]) -> list[dict[str, Any]]:
    """The table of all runs in the output folder, which it also writes and prints."""
    lines, every = [], []
    for por in arguments.por:
        script = script_with_overlap(**script_arguments(arguments, por))
        of_arms: dict[str, list[dict[str, Any]]] = {}
        for arm in ARMS:
            rows = step_rows(run_folder(arguments, arm, por), apart=bool(arguments.apart))
            if not rows:
                continue
            if not arguments.apart:  # a finished prompt of the next step may come before a late one of this step
                refuse_other_work(rows[arguments.unmeasured :], script, f"{arm}_{por:g}")
            for row in rows:
                row["tool_seconds"] = tool_seconds_of(row["step"], arguments.tool_seconds, arguments.unmeasured)
            every += [{"arm": arm, "por": script.por, **row} for row in rows]
            of_arms[arm] = rows
        for tool_seconds in dict.fromkeys(arguments.tool_seconds):
            lines += _lines(arguments, por, tool_seconds, script, of_arms)
    about = {
        name: getattr(arguments, name) for name in ("model", "gpus", "apart", "prompts", "sessions", "scale", "eager")
    }
    about["layers"] = layers_of(arguments)
    about["single_turn"] = " ".join(map(str, arguments.single_turn or ()))
    about |= {"liger": arguments.liger, "stock_attention": made_by["stock_attention"], **made_by}
    lines = [{**line, **about} for line in lines]
    write_csv(arguments.csv, lines)
    write_csv(arguments.output / "steps.csv", [{**row, **about} for row in every])
    for line in lines:
        print(describe(line), flush=True)
    return lines


def _lines(
    arguments: argparse.Namespace,
    por: float,
    tool_seconds: float,
    script: Script,
    of_arms: Mapping[str, Sequence[Mapping[str, Any]]],
) -> list[dict[str, Any]]:
    """The table's lines of one latency of tools, one for each arm that ran."""
    found: dict[str, dict[str, Any]] = {}
    alone = alone_per_second(arguments, por, tool_seconds)
    for arm, rows in of_arms.items():
        measured = rows[arguments.unmeasured :]
        counted = [row for row in measured if row["tool_seconds"] == tool_seconds]
        if measured and not counted:  # this arm ran fewer steps
            continue
        found[arm] = {"arm": arm, "por": script.por, "tool_seconds": tool_seconds, **summary(counted)}
        found[arm]["generated_per_s"] = script.generated_tokens / found[arm]["rollout_s"]
        if alone is not None:
            found[arm]["vllm_alone_per_s"] = alone
    if set(found) == set(ARMS):
        stock, tree = found[STOCK], found[TREE]
        tree["speed_up"] = stock["step_s"] / tree["step_s"]
        spent = [sum(line[name] for name in UPDATE) for line in (stock, tree)]
        tree["update_ratio"] = spent[0] / spent[1]
        if por in arguments.ratios:
            tree["one_gpu_update_ratio"] = arguments.ratios[por]
            tree["amdahl_speed_up"] = amdahl(stock, arguments.ratios[por])
    return list(found.values())


def describe(line: Mapping[str, Any]) -> str:
    """One arm in one paragraph."""
    shares = ", ".join(f"{name.removesuffix('_s')} {line[name]:.2f}" for name in PARTS)
    text = f"{line['arm']}, POR {line['por']:.3f}: {line['step_s']:.2f} s a step ({shares}); {line['rows']} rows"
    if line["tool_seconds"]:
        text += f"; tools take {line['tool_seconds']:g} s"
    if line["gpu_idle_share"] != "":
        text += f"; GPUs idle {line['gpu_idle_share']:.2f} ({line['gpus_idle']}), {line['gpu_memory_gib']:.1f} GiB"
    text += f"; {line['generated_per_s']:.0f} tokens a second in the rollout"
    if "vllm_alone_per_s" in line:
        text += f", vLLM alone {line['vllm_alone_per_s']:.0f}"
    if "speed_up" in line:
        text += f"; {line['speed_up']:.2f} times stock verl, updates alone {line['update_ratio']:.2f}"
    if "amdahl_speed_up" in line:
        share = line["speed_up"] / line["amdahl_speed_up"]
        text += f"; Amdahl's law gives {line['amdahl_speed_up']:.2f}, reached {share:.2f}, "
        text += f"target {LEAST_OF_AMDAHL}: {'met' if share >= LEAST_OF_AMDAHL else 'missed'}"
    return text


def main(given: Sequence[str] | None = None) -> list[dict[str, Any]]:
    """Run the arms, then report."""
    arguments = parse(given)
    made_by = provenance(commit=arguments.commit, packages=PACKAGES)
    arms = [arm for arm in arguments.arms if arm != ALONE]
    made_by["stock_attention"] = stock_attention(arguments.gpus) if arms else ""
    for por in arguments.por:
        for arm in arms:
            play(arguments, arm, por)
        if ALONE in arguments.arms:
            play_alone(arguments, por)
    return report(arguments, made_by)


if __name__ == "__main__":
    main()
