"""Which operations of the trainer's layers give other bits than vLLM's, each on what vLLM computed before it.

python benchmarks/operations_of_vllm.py OUTPUT.csv --model FOLDER --data ROWS [--invariant]

vLLM (0.29) continues a recorded prompt, then reads the whole row at once, as a trainer does, in bf16 and without CUDA
graphs. `trainer`: a Llama of transformers, as for rows alone, against that reading. `vllm`: what vLLM computed for the
drawn tokens one by one, against the same reading; here differences grow through the layers. With `--invariant` vLLM is
batch-invariant and the trainer has its kernels, as in train_inference_gap.py. A line is an operation: the share of
values that differ, over all layers; the first layer in which any does; the largest difference, and the largest value of
its layer.
"""

import argparse
import os
import sys
from collections import defaultdict
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import torch

from tree_rl.benchmark.provenance import PACKAGES, provenance
from tree_rl.benchmark.results import Columns, write_csv
from tree_rl.training import rows_alone

sys.path.insert(0, str(Path(__file__).parent))
import train_inference_gap as gap

Seen = dict[str, torch.Tensor]
"""What vLLM computed for a row's tokens, [L, width], by `LAYER.OPERATION`, or by operation outside the layers."""
PASSES: list[dict[str, list[torch.Tensor]]] = []
"""What the last of vLLM's passes computed, piece by piece."""


def keep(name: str, values: Any) -> None:
    """Add what a part of vLLM's model computed; of a norm that adds the residual, the normed values."""
    values = values[0] if isinstance(values, tuple) else values
    PASSES[-1][name].append(values.detach().reshape(len(values), -1).cpu().clone())


def watch(model: Any) -> None:
    """Keep what every operation of vLLM's Llama computes."""

    def output_of(name: str, module: Any) -> None:
        module.register_forward_hook(lambda _, __, output: keep(name, output))

    output_of("embedding", model.model.embed_tokens)
    output_of("last_norm", model.model.norm)
    for number, layer in enumerate(model.model.layers):
        attention, mlp = layer.self_attn, layer.mlp
        output_of(f"{number}.norm", layer.input_layernorm)
        output_of(f"{number}.projected", attention.qkv_proj)
        output_of(f"{number}.attended", attention.attn)
        output_of(f"{number}.output", attention.o_proj)
        output_of(f"{number}.mlp_norm", layer.post_attention_layernorm)
        output_of(f"{number}.gate_up", mlp.gate_up_proj)
        output_of(f"{number}.activated", mlp.act_fn)
        output_of(f"{number}.mlp", mlp.down_proj)

        def inputs(_: Any, given: tuple[torch.Tensor, ...], number: int = number) -> None:
            keep(f"{number}.turned", torch.cat([values.flatten(1) for values in given[:2]], -1))
            keep(f"{number}.value", given[2])

        attention.attn.register_forward_pre_hook(inputs)


def drawn_and_read(arguments: argparse.Namespace) -> tuple[list[int], tuple[Seen, Seen], list[float]]:
    """A row of vLLM, what it computed for the row's tokens one by one and for all at once, and the log-probs of drawn
    tokens that it reports for the latter.
    """
    from vllm import LLM, SamplingParams
    from vllm.inputs import TokensPrompt

    engine = LLM(
        model=str(arguments.model),
        dtype="bfloat16",
        enforce_eager=True,
        enable_prefix_caching=False,
        gpu_memory_utilization=0.3,
        max_model_len=arguments.prompt_tokens + arguments.tokens,
        max_num_batched_tokens=arguments.prompt_tokens + arguments.tokens,
    )
    engine.apply_model(watch)

    def run(tokens: list[int], **settings: Any) -> tuple[Any, Seen]:
        PASSES.append(defaultdict(list))
        sampling = SamplingParams(ignore_eos=True, seed=0, **settings)
        output = engine.generate([TokensPrompt(prompt_token_ids=tokens)], sampling)[0]
        return output, {name: torch.cat(pieces) for name, pieces in PASSES.pop().items()}

    (prompt,) = gap.prompts_of(arguments)
    output, one_by_one = run(prompt, max_tokens=arguments.tokens)
    row = prompt + list(output.outputs[0].token_ids)[:-1]  # the last one is drawn, but not read
    output, at_once = run(row, max_tokens=1, prompt_logprobs=0)
    log_probs = [of[token].logprob for of, token in zip(output.prompt_logprobs[1:], row[1:], strict=True)]
    return row, (one_by_one, at_once), log_probs


def differences(name: str, received: torch.Tensor, wanted: torch.Tensor) -> Columns:
    """How many values differ, and how far."""
    received, wanted = (values.detach().reshape(len(wanted), -1).float().cpu() for values in (received, wanted))
    gaps = (received - wanted).abs()
    number, _, operation = name.rpartition(".")
    figures = {"differ": (gaps > 0).float().mean().item(), "largest": gaps.max().item()}
    return {"operation": operation, "layer": number, **figures, "of": wanted.abs().max().item()}


def of_trainer(model: Any, row: list[int], seen: Mapping[str, torch.Tensor]) -> Iterator[tuple[str, torch.Tensor]]:
    """What a Llama of transformers computes from vLLM's inputs of every operation, by the names of `Seen`."""
    import transformers.models.llama.modeling_llama as llama
    from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

    device = next(model.parameters()).device
    attend = ALL_ATTENTION_FUNCTIONS[model.config._attn_implementation]
    ids = torch.tensor([row], device=device)

    def given(name: str) -> torch.Tensor:
        return seen[name][None].to(device)

    yield "embedding", model.model.embed_tokens(ids)[0]
    residual = given("embedding")
    cos_sin = model.model.rotary_emb(residual, torch.arange(len(row), device=device)[None])
    for number, layer in enumerate(model.model.layers):
        attention, mlp = layer.self_attn, layer.mlp

        def heads(values: torch.Tensor, size: int = attention.head_dim) -> torch.Tensor:
            return values.unflatten(-1, (-1, size)).transpose(1, 2).clone()

        yield f"{number}.norm", layer.input_layernorm(residual)[0]
        parts = [part(given(f"{number}.norm")) for part in (attention.q_proj, attention.k_proj, attention.v_proj)]
        yield f"{number}.projected", torch.cat(parts, -1)[0]
        widths = [part.shape[-1] for part in parts]
        query, key, _ = given(f"{number}.projected").split(widths, -1)
        turned = llama.apply_rotary_pos_emb(heads(query), heads(key), *cos_sin)
        yield f"{number}.turned", torch.cat([values.transpose(1, 2).flatten(2) for values in turned], -1)[0]
        query, key = given(f"{number}.turned").split(widths[:2], -1)
        inputs = (heads(query), heads(key), heads(given(f"{number}.value")), None)  # no mask: causal
        yield f"{number}.attended", attend(attention, *inputs, scaling=attention.scaling)[0][0].flatten(1)
        yield f"{number}.output", attention.o_proj(given(f"{number}.attended"))[0]
        residual = residual + given(f"{number}.output")
        yield f"{number}.mlp_norm", layer.post_attention_layernorm(residual)[0]
        normed = given(f"{number}.mlp_norm")
        yield f"{number}.gate_up", torch.cat([mlp.gate_proj(normed), mlp.up_proj(normed)], -1)[0]
        yield f"{number}.mlp", mlp(normed)[0]
        residual = residual + given(f"{number}.mlp")
    yield "last_norm", model.model.norm(residual)[0]
    logits = model.lm_head(given("last_norm"))[0]
    yield "log_probs", rows_alone.next_log_probs(logits, ids[0], 1.0)[:-1]


def summary(side: str, found: list[Columns]) -> list[Columns]:
    """One line an operation."""
    lines = []
    for operation in dict.fromkeys(one["operation"] for one in found):
        layers: list[Any] = [one for one in found if one["operation"] == operation]
        first = next((one["layer"] for one in layers if one["differ"]), "")
        differ = sum(one["differ"] for one in layers) / len(layers)
        largest = max(layers, key=lambda one: one["largest"])
        numbers = {"differ": differ, "first_layer": first, "largest": largest["largest"], "of": largest["of"]}
        lines.append({"side": side, "operation": operation, **numbers})
    return lines


def main() -> None:
    """Compare, print and write."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("output", type=Path)
    parser.add_argument("--model", type=Path, required=True, help="folder of published weights of a Llama, a tokenizer")
    parser.add_argument("--data", type=Path, required=True, help="recorded rows")
    parser.add_argument("--invariant", action="store_true", help="batch-invariant kernels on both sides, on a GPU")
    parser.add_argument("--prompt-tokens", type=int, default=2048)
    parser.add_argument("--tokens", type=int, default=64, help="that vLLM draws")
    arguments = parser.parse_args()
    arguments.prompts = 1
    if arguments.invariant:
        os.environ[gap.INVARIANT] = "1"
    os.environ |= {"VLLM_ENABLE_V1_MULTIPROCESSING": "0", "VLLM_ALLOW_INSECURE_SERIALIZATION": "1"}
    row, (one_by_one, at_once), log_probs = drawn_and_read(arguments)
    drawn = slice(1 - arguments.tokens, None)
    lines = summary("vllm", [differences(name, one_by_one[name][drawn], at_once[name][drawn]) for name in at_once])
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    setting = "invariant" if arguments.invariant else "stock"
    model = gap.trainer(setting, arguments.model, device)
    at_once["log_probs"] = torch.tensor(log_probs)
    with torch.no_grad():
        computed = of_trainer(model, row, at_once)
        lines += summary("trainer", [differences(name, values, at_once[name]) for name, values in computed])
    about = {"setting": setting, "model": arguments.model.name, "tokens": len(row), "drawn": arguments.tokens}
    for line in lines:
        print(*line.values(), flush=True)
    write_csv(arguments.output, [line | about | provenance(packages=[*PACKAGES, "vllm"]) for line in lines])


if __name__ == "__main__":
    main()
