"""How far the trainer's log-probs are from vLLM's for the tokens that vLLM drew: rows alone and trees, by settings.

python benchmarks/train_inference_gap.py OUTPUT.csv --model FOLDER --data ROWS

Settings of vLLM 0.29: `graphs` (compiled, CUDA graphs), `eager` (its own kernels, not compiled) and `invariant`
(graphs, `VLLM_BATCH_INVARIANT=1`). Of the trainer, in bf16: `stock` (transformers' layers), `liger`, and `invariant`
(vLLM's batch-invariant products, softmax and RMSNorm; forward alone). Every setting runs in a process of its own.
Sessions continue the first tokens of recorded rows, several times each at temperature 1, so that prompts are shared.
"""

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForCausalLM

from tree_rl.models import use_tree_attention
from tree_rl.training.loss.edges import forest_log_probs
from tree_rl.training.rows_alone import branch_log_probs
from tree_rl.tree import Forest

SAMPLERS = {"graphs": False, "eager": True, "invariant": False}
"""Setting of vLLM -> `enforce_eager`."""
TRAINERS = ("stock", "liger", "invariant")
INVARIANT = "VLLM_BATCH_INVARIANT"


def draw(arguments: argparse.Namespace) -> None:
    """Continue every prompt with vLLM twice, the second time timed; leave rows and log-probs in `--samples-file`."""
    from vllm import LLM, SamplingParams
    from vllm.inputs import TokensPrompt

    prompts = [TokensPrompt(prompt_token_ids=prompt) for prompt in json.loads(arguments.prompts_file.read_text())]
    engine = LLM(
        model=str(arguments.model),
        dtype="bfloat16",
        enforce_eager=SAMPLERS[arguments.play],
        gpu_memory_utilization=0.5,
        logprobs_mode="processed_logprobs",
    )
    sampling = SamplingParams(n=arguments.samples, max_tokens=arguments.tokens, logprobs=0, ignore_eos=True, seed=0)
    engine.generate(prompts, sampling)
    started = time.perf_counter()
    outputs = engine.generate(prompts, sampling)
    seconds = time.perf_counter() - started
    drawn = []
    for prompt, output in zip(prompts, outputs, strict=True):
        for one in output.outputs:
            found = [of[token].logprob for of, token in zip(one.logprobs, one.token_ids, strict=True)]
            drawn.append({"prompt": prompt["prompt_token_ids"], "drawn": list(one.token_ids), "log_probs": found})
    arguments.samples_file.write_text(json.dumps({"sessions": drawn, "seconds": seconds}))


def trainer(setting: str, folder: Path, device: torch.device) -> Any:
    """The model in bf16 with a setting's layers."""
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.bfloat16).to(device).eval()
    if setting == "liger":
        from tree_rl.models.fused_layers import use_liger_layers

        use_liger_layers(model, device=device)
    if setting == "invariant":
        from vllm.model_executor.determinism.batch_invariant import init_batch_invariance, rms_norm_batch_invariant

        init_batch_invariance()
        for norm in (module for module in model.modules() if type(module).__name__.endswith("RMSNorm")):
            norm.forward = lambda hidden, norm=norm: rms_norm_batch_invariant(
                hidden, norm.weight.data, norm.variance_epsilon
            )
    return model


def gaps(model: Any, sessions: list[dict[str, list[Any]]]) -> dict[str, float]:
    """Figures of rows alone and of one tree a prompt, over all drawn tokens; sessions of a prompt follow each other."""
    rows = [session["prompt"] + session["drawn"] for session in sessions]
    theirs = torch.tensor([value for session in sessions for value in session["log_probs"]])
    drawn, of_prompt = [], dict[tuple[int, ...], list[list[int]]]()
    for row, session in zip(rows, sessions, strict=True):
        is_drawn = torch.arange(len(row)) >= len(session["prompt"])
        drawn.append(is_drawn.roll(-1))  # a token's log-prob stands at the token before it
        of_prompt.setdefault(tuple(session["prompt"]), []).append(row)
    device = next(model.parameters()).device
    figures = {}
    with torch.no_grad():
        alone = branch_log_probs(model, rows).float().cpu()
        use_tree_attention(model)
        trees = [forest_log_probs(model, Forest.from_rows(group), device=device) for group in of_prompt.values()]
    for name, ours in (("rows", alone), ("trees", torch.cat(trees).float().cpu())):
        gap = ours[torch.cat(drawn)] - theirs
        figures[f"{name}_mean"] = gap.abs().mean().item()
        figures[f"{name}_largest"] = gap.abs().max().item()
        figures[f"{name}_k3"] = (gap.exp() - 1 - gap).mean().item()
        figures[f"{name}_equal"] = (gap == 0).float().mean().item()
    return figures


def prompts_of(arguments: argparse.Namespace) -> list[list[int]]:
    """The first tokens of the longest row of each of the first groups."""
    from tree_rl.inspection.row_file import read_row_file

    longest: dict[str, list[int]] = {}
    for row in read_row_file(arguments.data, tokenizer=arguments.model):
        tokens = row.token_ids[: arguments.prompt_tokens].tolist()
        if len(tokens) > len(longest.get(row.group, [])):
            longest[row.group] = tokens
    return list(longest.values())[: arguments.prompts]


def measured(arguments: argparse.Namespace, folder: Path) -> Iterator[dict[str, Any]]:
    """One row of the table for each pair of settings; a setting that fails is named with what it said last."""
    prompts_file = folder / "prompts.json"
    prompts_file.write_text(json.dumps(prompts_of(arguments)))
    for sampler in arguments.samplers:
        samples_file = folder / f"{sampler}.json"
        said = play(arguments, sampler, "draw", prompts_file, samples_file)
        if not samples_file.exists():
            yield {"sampler": sampler, "note": said}
            continue
        found = json.loads(samples_file.read_text())
        drawn = sum(len(session["drawn"]) for session in found["sessions"])
        for setting in arguments.trainers:
            said = play(arguments, setting, "train", prompts_file, samples_file)
            row = {"sampler": sampler, "trainer": setting, "drawn": drawn, "drawn_per_s": drawn / found["seconds"]}
            figures = json.loads(said) if said.startswith("{") else {"note": said}
            print(*row.values(), figures, flush=True)
            yield row | figures


def play(arguments: argparse.Namespace, setting: str, part: str, prompts_file: Path, samples_file: Path) -> str:
    """Run a setting in its own process; the last line that it printed."""
    # vLLM would fork its engine from a process that has asked for devices, after which CUDA does not start.
    environment = os.environ | {"VLLM_WORKER_MULTIPROC_METHOD": "spawn"}
    environment |= {INVARIANT: "1"} if setting == "invariant" else {}
    command = [sys.executable, __file__, str(arguments.output), "--model", str(arguments.model), "--play", setting]
    command += ["--part", part, "--prompts-file", str(prompts_file), "--samples-file", str(samples_file)]
    command += ["--samples", str(arguments.samples), "--tokens", str(arguments.tokens)]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    if done.returncode:  # what a process of vLLM's engine died of stands far above the last line
        print(done.stderr, file=sys.stderr, flush=True)
    lines = (done.stdout if done.returncode == 0 else done.stderr).strip().splitlines()
    return lines[-1][-300:] if lines else ""


def main() -> None:
    """Play one setting, or all of them."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("output", type=Path)
    parser.add_argument("--model", type=Path, required=True, help="folder of published weights with a tokenizer")
    parser.add_argument("--data", type=Path, help="recorded rows")
    parser.add_argument("--samplers", nargs="+", choices=list(SAMPLERS), default=list(SAMPLERS))
    parser.add_argument("--trainers", nargs="+", choices=TRAINERS, default=list(TRAINERS))
    parser.add_argument("--prompts", type=int, default=16)
    parser.add_argument("--prompt-tokens", type=int, default=2048)
    parser.add_argument("--samples", type=int, default=8, help="of a prompt")
    parser.add_argument("--tokens", type=int, default=512, help="of a sample")
    for name in ("--play", "--part"):
        parser.add_argument(name, help=argparse.SUPPRESS)
    for name in ("--prompts-file", "--samples-file"):
        parser.add_argument(name, type=Path, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.data is None and arguments.part is None:
        parser.error("--data: expected recorded rows, received none")
    if arguments.part == "draw":
        draw(arguments)
    elif arguments.part == "train":
        device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
        sessions = json.loads(arguments.samples_file.read_text())["sessions"]
        print(json.dumps(gaps(trainer(arguments.play, arguments.model, device), sessions)))
    else:
        from tree_rl.benchmark.provenance import PACKAGES, provenance
        from tree_rl.benchmark.results import collect_rows

        names = ("prompts", "prompt_tokens", "samples", "tokens")
        about: dict[str, Any] = {"model": arguments.model.name, **{name: getattr(arguments, name) for name in names}}
        with tempfile.TemporaryDirectory() as folder:
            about |= provenance(packages=[*PACKAGES, "vllm"])
            collect_rows(measured(arguments, Path(folder)), about, arguments.output)


if __name__ == "__main__":
    main()
