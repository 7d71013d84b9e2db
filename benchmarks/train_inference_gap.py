"""How far the trainer's log-probs are from vLLM's for the tokens that vLLM drew: rows alone and trees, by settings.

python benchmarks/train_inference_gap.py OUTPUT.csv --model FOLDER --data ROWS

Settings of vLLM 0.29: `compiled` (its default), `float32_head` (the same with logits in float32), `graphs` (its own
kernels, decoding in CUDA graphs) and `invariant` (`graphs` with `VLLM_BATCH_INVARIANT=1`). Of the trainer, in bf16:
`stock` (transformers' layers), `liger`, and `invariant` (a Llama on the kernels of vLLM's `invariant`; for rows
attention too, in which drawn tokens attend one by one, as vLLM decodes them; forward alone). Heads are in bf16, but
trees of `stock` and `liger` have ours, whose logits are float32. `vllm` in a row of the table: vLLM's log-probs of the
same tokens, read as a prompt. Every setting runs in a process of its own. Sessions continue the first tokens of
recorded rows, several times each at temperature 1, so that prompts are shared.

`--head-size` pads the heads with zeros: flash-attn 3 decodes heads of 64 in other tiles than it reads them, heads of
128 in the same (https://github.com/vllm-project/vllm/issues/51902).
"""

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from types import MethodType
from typing import Any

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from tree_rl.models import use_edge_head, use_tree_attention
from tree_rl.training import rows_alone
from tree_rl.training.loss.edges import forest_log_probs
from tree_rl.tree import Forest

UNCOMPILED = {"compilation_config": {"mode": 0, "cudagraph_mode": "FULL_DECODE_ONLY"}}
SAMPLERS: dict[str, dict[str, Any]] = {
    "compiled": {},
    "float32_head": {"hf_overrides": {"head_dtype": "float32"}},
    "graphs": UNCOMPILED,
    "invariant": UNCOMPILED,
}
"""Setting of vLLM -> its arguments."""
TRAINERS = ("stock", "liger", "invariant")
INVARIANT = {"VLLM_BATCH_INVARIANT": "1"}
PAGE = 16
"""Tokens of a page of vLLM's KV cache."""


def draw(arguments: argparse.Namespace) -> None:
    """Continue every prompt with vLLM twice, the second time timed; leave rows, log-probs and those of the same rows as
    prompts in `--samples-file`.
    """
    from vllm import LLM, SamplingParams
    from vllm.inputs import TokensPrompt

    prompts = [TokensPrompt(prompt_token_ids=prompt) for prompt in json.loads(arguments.prompts_file.read_text())]
    engine = LLM(
        model=str(arguments.model),
        dtype="bfloat16",
        gpu_memory_utilization=0.5,
        logprobs_mode="processed_logprobs",
        **SAMPLERS[arguments.play],
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
    rows = [TokensPrompt(prompt_token_ids=session["prompt"] + session["drawn"]) for session in drawn]
    outputs = engine.generate(rows, SamplingParams(max_tokens=1, prompt_logprobs=0))
    for session, read in zip(drawn, outputs, strict=True):
        of_drawn = read.prompt_logprobs[len(session["prompt"]) :]
        session["read"] = [of[token].logprob for of, token in zip(of_drawn, session["drawn"], strict=True)]
    arguments.samples_file.write_text(json.dumps({"sessions": drawn, "seconds": seconds}))


def with_padded_heads(folder: Path, size: int, padded: Path) -> Path:
    """Save a Llama's weights in bf16 with every head padded by zeros; log-probs change by rounding alone.

    Raises:
        ValueError: `size` is no multiple of the heads'.
    """
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    config = model.config
    if size % config.head_dim:
        raise ValueError(f"--head-size {size}: expected a multiple of {config.head_dim}, the heads of {folder}")
    # RoPE turns the dimensions i and i + size / 2 by base ** (-2 i / size): those of equal angles take the old ones.
    first = torch.arange(config.head_dim // 2) * (size // config.head_dim)
    places = torch.cat([first, first + size // 2])

    def pad(rows: torch.Tensor) -> torch.Tensor:
        """Rows by head, [heads * old size, width], among rows of zeros."""
        heads = rows.unflatten(0, (-1, config.head_dim))
        wide = heads.new_zeros(len(heads), size, rows.shape[1])
        wide[:, places] = heads
        return wide.flatten(0, 1)

    weights = model.state_dict()
    for name, values in weights.items():
        if name.endswith("q_proj.weight"):  # scores are divided by the root of the size
            weights[name] = pad(values) * (size / config.head_dim) ** 0.5
        elif name.endswith(("k_proj.weight", "v_proj.weight")):
            weights[name] = pad(values)
        elif name.endswith("o_proj.weight"):
            weights[name] = pad(values.T).T
    config.head_dim = size
    model = AutoModelForCausalLM.from_config(config)
    model.load_state_dict(weights)
    model.to(torch.bfloat16).save_pretrained(padded)
    AutoTokenizer.from_pretrained(folder).save_pretrained(padded)
    return padded


def trainer(setting: str, folder: Path, device: torch.device) -> Any:
    """The model in bf16 with a setting's layers."""
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.bfloat16).to(device).eval()
    if setting == "liger":
        from tree_rl.models.fused_layers import use_liger_layers

        use_liger_layers(model, device=device)
    if setting == "invariant":
        use_kernels_of_vllm(model)
    return model


def use_kernels_of_vllm(model: Any) -> None:
    """Give a Llama the kernels that vLLM's batch-invariant mode has on an H200; trees keep their own attention.

    Queries from `model.decoded_from` on, if it is set, attend one by one, as vLLM decodes them.
    """
    import transformers.models.llama.modeling_llama as llama
    from transformers import AttentionInterface
    from vllm import _custom_ops as ops
    from vllm.model_executor.determinism import batch_invariant as kernels
    from vllm.v1.worker.gpu.sample.logprob import compute_token_logprobs
    from vllm.vllm_flash_attn.flash_attn_interface import flash_attn_varlen_func

    kernels.init_batch_invariance()
    first_norm = model.model.layers[0].input_layernorm

    def linear(module: Any, hidden: torch.Tensor) -> torch.Tensor:
        return kernels.linear_batch_invariant(hidden, module.weight, module.bias)

    def norm(module: Any, hidden: torch.Tensor) -> torch.Tensor:
        if module is first_norm:
            return kernels.rms_norm_batch_invariant(hidden, module.weight.data, module.variance_epsilon)
        # vLLM adds the residual in the norm; transformers has added it, so zeros are added here.
        normed = torch.zeros_like(hidden)
        ops.fused_add_rms_norm(normed, hidden.clone(), module.weight.data, module.variance_epsilon)
        return normed

    def cos_sin(module: Any, hidden: torch.Tensor, position_ids: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        frequencies, _ = module.compute_default_rope_parameters(module.config, hidden.device)
        angles = (position_ids[..., None].float() * frequencies).repeat(1, 1, 2)
        return angles.cos().to(hidden.dtype), angles.sin().to(hidden.dtype)

    def rotate(query: torch.Tensor, key: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> list[torch.Tensor]:
        flat = [heads[0].transpose(0, 1).flatten(1).contiguous() for heads in (query, key)]
        cache = torch.cat([cos[0].chunk(2, -1)[0], sin[0].chunk(2, -1)[0]], -1)  # of the tokens, in their order
        ops.rotary_embedding(torch.arange(len(cache), device=cos.device), *flat, query.shape[-1], cache, True)
        return [turned.view(1, len(turned), -1, query.shape[-1]).transpose(1, 2) for turned in flat]

    def swiglu(module: Any, hidden: torch.Tensor) -> torch.Tensor:
        gate_and_up = torch.cat([module.gate_proj(hidden), module.up_proj(hidden)], -1)
        out = gate_and_up.new_empty(*hidden.shape[:-1], gate_and_up.shape[-1] // 2)
        torch.ops._C.silu_and_mul(out, gate_and_up)
        return module.down_proj(out)

    def attend(_: Any, query: Any, key: Any, value: Any, mask: Any, *, scaling: float, **__: Any) -> Any:
        length = query.shape[2]
        read = min(getattr(model, "decoded_from", length), length)
        pages = torch.arange(-(-length // PAGE), dtype=torch.int32, device=query.device)
        query = query[0].transpose(0, 1).contiguous()

        def paged(heads: torch.Tensor) -> torch.Tensor:
            padding = (0, 0, 0, 0, 0, len(pages) * PAGE - length)
            return torch.nn.functional.pad(heads[0].transpose(0, 1), padding).unflatten(0, (-1, PAGE)).contiguous()

        cache = paged(key), paged(value)
        settings = {"softmax_scale": scaling, "causal": True, "num_splits": 1, "fa_version": 3}

        def attended(queries: torch.Tensor, longest: int, keys: torch.Tensor) -> torch.Tensor:
            """Queries of one size, each with the keys before its end."""
            starts = torch.arange(len(keys) + 1, dtype=torch.int32, device=keys.device) * longest
            sizes = {"cu_seqlens_q": starts, "seqused_k": keys, "max_seqlen_q": longest, "max_seqlen_k": length}
            return flash_attn_varlen_func(queries, *cache, block_table=pages.repeat(len(keys), 1), **sizes, **settings)

        parts = []
        if read:
            parts.append(attended(query[:read], read, pages.new_tensor([read])))
        if read < length:
            keys = torch.arange(read + 1, length + 1, dtype=torch.int32, device=query.device)
            parts.append(attended(query[read:], 1, keys))
        return torch.cat(parts)[None], None

    def next_log_probs(logits_LV: torch.Tensor, ids_L: torch.Tensor, temperature: float) -> torch.Tensor:
        # At temperature 1 vLLM leaves the logits in bf16, in which its kernel sums in another order.
        logits_LV = logits_LV if temperature == 1 else logits_LV.float() / temperature
        found = compute_token_logprobs(logits_LV[:-1], ids_L[1:, None]).squeeze(1)
        return torch.cat([found, found.new_zeros(1)])

    forwards: dict[type, Callable[..., Any]] = {
        torch.nn.Linear: linear,
        llama.LlamaRMSNorm: norm,
        llama.LlamaRotaryEmbedding: cos_sin,
        llama.LlamaMLP: swiglu,
    }
    for module in model.modules():  # `use_tree_attention` keeps forwards of modules, but not of classes
        if type(module) in forwards:
            module.forward = MethodType(forwards[type(module)], module)
    llama.apply_rotary_pos_emb = rotate
    rows_alone.next_log_probs = next_log_probs
    AttentionInterface.register("kernels_of_vllm", attend)
    model.config._attn_implementation = "kernels_of_vllm"


def gaps(model: Any, sessions: list[dict[str, list[Any]]]) -> dict[str, float]:
    """Figures of rows alone and of one tree a prompt, over all drawn tokens; sessions of a prompt follow each other."""
    rows = [session["prompt"] + session["drawn"] for session in sessions]
    names = "log_probs", "read"
    theirs, read = (torch.tensor([value for session in sessions for value in session[name]]) for name in names)
    alone, drawn, of_prompt = [], [], dict[tuple[int, ...], list[list[int]]]()
    for row, session in zip(rows, sessions, strict=True):
        # vLLM has the prompt's full pages from the first round, and reads few tokens as it decodes one.
        model.decoded_from = (len(session["prompt"]) - 1) // PAGE * PAGE
        with torch.no_grad():
            alone.append(rows_alone.branch_log_probs(model, [row]).float().cpu())
        is_drawn = torch.arange(len(row)) >= len(session["prompt"])
        drawn.append(is_drawn.roll(-1))  # a token's log-prob stands at the token before it
        of_prompt.setdefault(tuple(session["prompt"]), []).append(row)
    device = next(model.parameters()).device
    figures = {}
    with torch.no_grad():
        use_tree_attention(model)
        use_edge_head(model)
        trees = [forest_log_probs(model, Forest.from_rows(group), device=device) for group in of_prompt.values()]
    is_drawn_F = torch.cat(drawn)
    found = {"rows": torch.cat(alone)[is_drawn_F], "trees": torch.cat(trees).float().cpu()[is_drawn_F], "vllm": read}
    for name, ours in found.items():
        gap = ours - theirs
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
    environment |= INVARIANT if setting == "invariant" else {}
    command = [sys.executable, __file__, str(arguments.output), "--model", str(arguments.model), "--play", setting]
    command += ["--part", part, "--prompts-file", str(prompts_file), "--samples-file", str(samples_file)]
    command += ["--samples", str(arguments.samples), "--tokens", str(arguments.tokens)]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    if done.returncode:  # what a process of vLLM's engine died of stands far above the last line
        print(done.stderr, file=sys.stderr, flush=True)
    lines = (done.stdout if done.returncode == 0 else done.stderr[-300:]).strip().splitlines()
    return lines[-1] if lines else ""


def main() -> None:
    """Play one setting, or all of them."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("output", type=Path)
    parser.add_argument("--model", type=Path, required=True, help="folder of published weights with a tokenizer")
    parser.add_argument("--data", type=Path, help="recorded rows")
    parser.add_argument("--head-size", type=int, help="pad the heads of the model to this size")
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

        names = ("head_size", "prompts", "prompt_tokens", "samples", "tokens")
        about: dict[str, Any] = {"model": arguments.model.name, **{name: getattr(arguments, name) for name in names}}
        with tempfile.TemporaryDirectory() as folder:
            if arguments.head_size:
                arguments.model = with_padded_heads(arguments.model, arguments.head_size, Path(folder) / "padded")
            about |= provenance(packages=[*PACKAGES, "vllm"])
            collect_rows(measured(arguments, Path(folder)), about, arguments.output)


if __name__ == "__main__":
    main()
