"""Which operations of the trainer's layers give other bits than vLLM's; whether vLLM's decoding repeats its prefill.

python benchmarks/operations_of_vllm.py OUTPUT.csv --model FOLDER --data ROWS [--invariant] [--head-size 128]

vLLM (0.29) continues a recorded prompt, then reads the whole row at once, as a trainer does, in bf16, not compiled.
`trainer`: each operation of transformers' Llama is fed what vLLM computed before it while reading, and compared with
vLLM's. `vllm`: what vLLM computed for drawn tokens one by one, against the same in the whole row; here differences grow
through the layers. With `--invariant` vLLM is batch-invariant and the trainer has its kernels, as in
train_inference_gap.py; `trainer_decoding`: as `trainer`, for the drawn tokens, fed what vLLM computed as it decoded,
attending one by one. Columns: the share of values that differ, mean over layers; the first layer in which any does
(`all` outside layers); the largest difference, and the largest value of that layer. More threads of a CPU make other
sums.
"""

import argparse
import os
import sys
import tempfile
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
"""What vLLM computed for the tokens of a row, [L, width], by `LAYER.OPERATION`, or by operation outside the layers; and
the log-probs of next tokens, [L - 1].
"""
COMPUTED: dict[str, list[torch.Tensor]] = defaultdict(list)
"""The same of the request that runs, pass by pass."""


def keep(name: str, values: Any) -> None:
    """Add what a part of vLLM's model computed; of a norm that adds the residual, the normed values."""
    values = values[0] if isinstance(values, tuple) else values
    COMPUTED[name].append(values.detach().reshape(len(values), -1).cpu().clone())


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

        def keep_inputs(_: Any, heads: tuple[torch.Tensor, ...], number: int = number) -> None:
            query, key, value = (values.flatten(1) for values in heads[:3])
            keep(f"{number}.rotated", torch.cat([query, key], -1))
            keep(f"{number}.value", value)

        attention.attn.register_forward_pre_hook(keep_inputs)


def drawn_and_read(model: Path, prompt: list[int], tokens: int) -> tuple[list[int], Seen, Seen]:
    """A prompt that vLLM continues by some tokens; what it computed while it drew, one by one, and for the row at once.

    Raises:
        RuntimeError: vLLM computed other tokens than those of the row.
    """
    from vllm import LLM, SamplingParams
    from vllm.inputs import TokensPrompt

    most = len(prompt) + tokens + 1
    engine = LLM(
        model=str(model),
        dtype="bfloat16",
        enforce_eager=True,
        enable_prefix_caching=False,
        gpu_memory_utilization=0.3,
        max_model_len=most,
        max_num_batched_tokens=most,
    )
    engine.apply_model(watch)

    def run(token_ids: list[int], computed: int, **settings: Any) -> tuple[Any, Seen]:
        COMPUTED.clear()
        sampling = SamplingParams(ignore_eos=True, seed=0, **settings)
        output = engine.generate([TokensPrompt(prompt_token_ids=token_ids)], sampling)[0]
        seen = {name: torch.cat(pieces) for name, pieces in COMPUTED.items()}
        lengths = {len(values) for values in seen.values()}
        if lengths != {computed}:
            raise RuntimeError(f"vLLM computed {sorted(lengths)} tokens by operation, expected {computed} in each")
        return output, seen

    # The last token that it draws is not read.
    output, one_by_one = run(prompt, len(prompt) + tokens, max_tokens=tokens + 1, logprobs=0)
    row = prompt + list(output.outputs[0].token_ids)[:-1]
    of_drawn = output.outputs[0].logprobs[:-1]
    output, at_once = run(row, len(row), max_tokens=1, prompt_logprobs=0)
    of_prompt = output.prompt_logprobs[1 : len(prompt)]
    for seen, found in ((at_once, output.prompt_logprobs[1:]), (one_by_one, of_prompt + of_drawn)):
        seen["log_probs"] = torch.tensor([of[token].logprob for of, token in zip(found, row[1:], strict=True)])
    return row, one_by_one, at_once


def differences(name: str, received: torch.Tensor, wanted: torch.Tensor) -> Columns:
    """How many values differ, and how far; NaN differs from all."""
    received, wanted = (values.detach().reshape(len(wanted), -1).float().cpu() for values in (received, wanted))
    layer, _, operation = name.rpartition(".")
    figures = {"differ": (received != wanted).float().mean().item(), "largest": (received - wanted).abs().max().item()}
    return {"operation": operation, "layer": layer or "all", **figures, "largest_value": wanted.abs().max().item()}


def of_trainer(model: Any, row: list[int], seen: Mapping[str, torch.Tensor]) -> Iterator[tuple[str, torch.Tensor]]:
    """What a Llama of transformers computes from vLLM's inputs of every operation, by the names of `Seen`."""
    import transformers.models.llama.modeling_llama as llama
    from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

    device = next(model.parameters()).device
    attend = ALL_ATTENTION_FUNCTIONS[model.config._attn_implementation]
    ids = torch.tensor([row], device=device)

    def of_vllm(name: str) -> torch.Tensor:
        return seen[name][None].to(device)

    yield "embedding", model.model.embed_tokens(ids)[0]
    residual = of_vllm("embedding")
    cos_sin = model.model.rotary_emb(residual, torch.arange(len(row), device=device)[None])
    for number, layer in enumerate(model.model.layers):
        attention, mlp = layer.self_attn, layer.mlp

        def heads(values: torch.Tensor, size: int = attention.head_dim) -> torch.Tensor:
            return values.unflatten(-1, (-1, size)).transpose(1, 2).clone()

        yield f"{number}.norm", layer.input_layernorm(residual)[0]
        parts = [part(of_vllm(f"{number}.norm")) for part in (attention.q_proj, attention.k_proj, attention.v_proj)]
        yield f"{number}.projected", torch.cat(parts, -1)[0]
        widths = [part.shape[-1] for part in parts]
        query, key, _ = of_vllm(f"{number}.projected").split(widths, -1)
        rotated = llama.apply_rotary_pos_emb(heads(query), heads(key), *cos_sin)
        yield f"{number}.rotated", torch.cat([values.transpose(1, 2).flatten(2) for values in rotated], -1)[0]
        query, key = of_vllm(f"{number}.rotated").split(widths[:2], -1)
        inputs = (heads(query), heads(key), heads(of_vllm(f"{number}.value")), None)  # SDPA without a mask is causal
        yield f"{number}.attended", attend(attention, *inputs, scaling=attention.scaling)[0][0].flatten(1)
        yield f"{number}.output", attention.o_proj(of_vllm(f"{number}.attended"))[0]
        residual = residual + of_vllm(f"{number}.output")
        yield f"{number}.mlp_norm", layer.post_attention_layernorm(residual)[0]
        normed = of_vllm(f"{number}.mlp_norm")
        yield f"{number}.gate_up", torch.cat([mlp.gate_proj(normed), mlp.up_proj(normed)], -1)[0]
        yield f"{number}.mlp", mlp(normed)[0]
        residual = residual + of_vllm(f"{number}.mlp")
    yield "last_norm", model.model.norm(residual)[0]
    logits = model.lm_head(of_vllm("last_norm"))[0]
    yield "log_probs", rows_alone.next_log_probs(logits, ids[0], 1.0)[:-1]


def summary(side: str, found: list[Columns]) -> list[Columns]:
    """One line an operation."""
    lines = []
    for operation in dict.fromkeys(one["operation"] for one in found):
        layers: list[Any] = [one for one in found if one["operation"] == operation]
        first = next((one["layer"] for one in layers if one["differ"]), "")
        differ = sum(one["differ"] for one in layers) / len(layers)
        largest = max(layers, key=lambda one: one["largest"])
        figures = {name: largest[name] for name in ("largest", "largest_value")}
        lines.append({"side": side, "operation": operation, "differ": differ, "first_layer": first, **figures})
    return lines


def main() -> None:
    """Compare, print and write."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("output", type=Path)
    parser.add_argument("--model", type=Path, required=True, help="folder of published weights of a Llama, a tokenizer")
    parser.add_argument("--data", type=Path, required=True, help="recorded rows")
    parser.add_argument("--invariant", action="store_true", help="batch-invariant kernels on both sides, on a GPU")
    parser.add_argument("--head-size", type=int, help="pad the heads of the model to this size")
    parser.add_argument("--prompt-tokens", type=int, default=2048)
    parser.add_argument("--tokens", type=int, default=64, help="that vLLM draws and computes one by one")
    arguments = parser.parse_args()
    if arguments.tokens < 1:
        parser.error(f"--tokens {arguments.tokens}: expected at least 1")
    setting = "invariant" if arguments.invariant else "stock"
    os.environ |= gap.INVARIANT if arguments.invariant else {}
    os.environ |= {"VLLM_ENABLE_V1_MULTIPROCESSING": "0", "VLLM_ALLOW_INSECURE_SERIALIZATION": "1"}
    arguments.prompts = 1
    (prompt,) = gap.prompts_of(arguments)
    with tempfile.TemporaryDirectory() as padded:
        folder = arguments.model
        if arguments.head_size:
            folder = gap.with_padded_heads(folder, arguments.head_size, Path(padded))
        row, one_by_one, at_once = drawn_and_read(folder, prompt, arguments.tokens)
        model = gap.trainer(setting, folder, torch.device("cuda" if torch.cuda.is_available() else "cpu"))

    def drawn(values: torch.Tensor) -> torch.Tensor:
        return values[-arguments.tokens :]

    lines = summary("vllm", [differences(name, drawn(one_by_one[name]), drawn(at_once[name])) for name in one_by_one])
    with torch.no_grad():
        computed = of_trainer(model, row, at_once)
        lines += summary("trainer", [differences(name, values, at_once[name]) for name, values in computed])
        if arguments.invariant:
            model.decoded_from = len(prompt)
            computed = of_trainer(model, row, one_by_one)
            found = [differences(name, drawn(values), drawn(one_by_one[name])) for name, values in computed]
            lines += summary("trainer_decoding", found)
    about: Columns = {"setting": setting, "model": arguments.model.name, "head_size": arguments.head_size}
    about |= {"tokens": len(row), "drawn": arguments.tokens}
    about |= {"threads": torch.get_num_threads(), **provenance(packages=[*PACKAGES, "vllm"])}
    for line in lines:
        print(*line.values(), flush=True)
    write_csv(arguments.output, [line | about for line in lines])


if __name__ == "__main__":
    main()
