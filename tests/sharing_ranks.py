"""Gloo ranks that share a forest's tokens, in processes of their own: steps of tiny models against rows run alone."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import cache, partial
from typing import Any

import equal_gradients
import numpy as np
import torch
import torch.distributed as dist
from latent_models import latent_configs
from peft import LoraConfig, get_peft_model
from tiny_sizes import BRANCHING, ROPE, VOCAB, config_of, sizes, tokens
from torch.distributed.fsdp import fully_shard
from transformers import AutoModelForCausalLM, AutoModelForTokenClassification, PretrainedConfig

from tree_rl.models import use_edge_head, use_tree_attention
from tree_rl.training import EdgeOutputs, Rows, StepContext, TreeOptions, TreeStep
from tree_rl.training.loss.outputs import ENTROPY, LOG_PROBS, VALUES
from tree_rl.training.ranks.recovery import CountedCollectives

SIZES: dict[str, Any] = sizes(num_attention_heads=8, attention_dropout=0.0)
WINDOW = {**SIZES, "sliding_window": 5}
SOFTCAPS = {"attn_logit_softcapping": 4.0, "final_logit_softcapping": 6.0}
ONE_KEY_HEAD = {**SIZES, "num_key_value_heads": 1}
CONFIGS: dict[str, Callable[[], PretrainedConfig]] = {
    "qwen3": lambda: config_of("qwen3", **SIZES, tie_word_embeddings=True),
    "one_key_head": lambda: config_of("qwen3", **ONE_KEY_HEAD),
    "window": lambda: config_of("mistral", **WINDOW),
    "softcap": lambda: config_of("gemma2", **WINDOW, **SOFTCAPS, query_pre_attn_scalar=8),
    "gemma3": lambda: config_of("gemma3_text", **WINDOW, query_pre_attn_scalar=8),
    "sinks": lambda: config_of("gpt_oss", **WINDOW, num_local_experts=4, num_experts_per_tok=2, rope_parameters=ROPE),
}
CRITIC, LORA = "critic", "lora"
MODELS = (*CONFIGS, CRITIC, LORA)
# Its layers call `view` on what attention returns.
CONFIGS["head_a_rank"] = lambda: config_of("afmoe", **WINDOW | {"num_attention_heads": 4}, num_dense_layers=2)
CONFIGS["latent"] = lambda: latent_configs(vocab_size=VOCAB)["deepseek_v3"]
# Its gradients are not finite at an embedding of zero, such as that of token 0, which pads.
PER_LAYER = {"vocab_size_per_layer_input": SIZES["vocab_size"], "hidden_size_per_layer_input": 8, "laurel_rank": 4}
PER_LAYER |= {"num_kv_shared_layers": 0, "activation_sparsity_pattern": [0.0, 0.0]}
CONFIGS["gemma3n"] = lambda: config_of("gemma3n_text", **WINDOW, **PER_LAYER)
CONFIGS["one_head"] = lambda: config_of("qwen3", **ONE_KEY_HEAD | {"num_attention_heads": 1})


SHAPES = BRANCHING | {
    "one_row": [tokens(2, 13)],
    "one_token": [[5]],
    "two_tokens": [[5, 6]],
    "long_trunk": [tokens(3, 60) + tokens(40 + i, 2 + 3 * i) for i in range(4)],
    "better_by_the_solver": [[5, 6, 7], [5, 8], [5, *tokens(50, 5)]],
}


@dataclass(frozen=True, kw_only=True)
class Case:
    """One step of one model over the rows of each data-parallel group."""

    model: str = "qwen3"
    shapes: tuple[str, ...] = ("branches",)
    """Of each data-parallel group's rows; an empty name is a group without rows."""
    max_tokens: int | None = None
    is_coupled: bool = False
    """Whether the loss of a token depends on the other tokens of its row."""
    is_sharded: bool = False
    """Whether FSDP2 shards the parameters over all ranks."""

    @property
    def name(self) -> str:
        marks = ["coupled"] * self.is_coupled + ["sharded"] * self.is_sharded
        return "-".join([self.model, *self.shapes, str(self.max_tokens), *marks])


def build(name: str) -> Any:
    """A random model, the same weights at every call; its attention is transformers' own."""
    torch.manual_seed(0)
    config = CONFIGS["qwen3" if name in (CRITIC, LORA) else name]()
    if name == CRITIC:
        config.num_labels, config.classifier_dropout = 1, 0.0
        return AutoModelForTokenClassification.from_config(config, attn_implementation="eager").train()
    model = AutoModelForCausalLM.from_config(config, attn_implementation="eager")
    for parameter in (p for n, p in model.named_parameters() if n.endswith("sinks")):
        torch.nn.init.normal_(parameter)
    if name == LORA:
        model = get_peft_model(model, LoraConfig(r=4, target_modules=["q_proj", "v_proj", "down_proj"]))
        for parameter in (p for n, p in model.named_parameters() if "lora_B" in n):
            torch.nn.init.normal_(parameter, std=0.1)
    return model.train()


def prepare(model: Any, *, is_sharded: bool = False) -> Any:
    """Let a model read trees, under gradient checkpointing."""
    inner = model.get_base_model() if hasattr(model, "get_base_model") else model
    inner.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
    if hasattr(model, "enable_input_require_grads") and hasattr(model, "get_base_model"):
        model.enable_input_require_grads()
    use_tree_attention(inner)
    if hasattr(inner, "lm_head"):
        use_edge_head(inner)
    if is_sharded:
        for layer in inner.model.layers:
            fully_shard(layer)
        fully_shard(model)
    return model


def row_loss(values_t: torch.Tensor, entropy_t: torch.Tensor, seed: int, *, is_coupled: bool) -> torch.Tensor:
    """Loss of one row from what its positions say, the last one's log-prob and entropy apart."""
    weight_t = torch.from_numpy(np.random.default_rng(seed).normal(size=len(values_t))).float()
    if is_coupled:
        # The mean of nothing is not a number.
        return (weight_t * values_t).sum() / max(len(values_t), 1) * values_t.sum().exp() + entropy_t.square().sum()
    return (weight_t * values_t + 0.3 * values_t.square() + 0.1 * weight_t * entropy_t).sum()


@cache
def rows_alone(
    name: str, shapes: tuple[str, ...], is_coupled: bool
) -> tuple[dict[str, torch.Tensor], list[torch.Tensor]]:
    """Gradients of the sum of all rows' losses, each row through transformers' own model, and the rows' values."""
    model, total, found = build(name), torch.zeros(()), []
    for group, shape in enumerate(shapes):
        for index, row in enumerate(SHAPES.get(shape, [])):
            logits_TV = model(torch.tensor([row]), use_cache=False).logits[0].float()
            if logits_TV.shape[-1] == 1:
                values_t, entropy_t = logits_TV[:, 0], torch.zeros(len(row))
                found.append(values_t.detach())
            else:
                log_probs_tV = logits_TV.log_softmax(-1)[:-1]
                values_t = log_probs_tV.gather(-1, torch.tensor(row[1:], dtype=torch.long)[:, None])[:, 0]
                entropy_t = -(log_probs_tV.exp() * log_probs_tV).sum(-1)
                found.append(torch.nn.functional.pad(values_t.detach(), (0, 1)))
            total = total + row_loss(values_t, entropy_t, 100 * group + index, is_coupled=is_coupled)
    return equal_gradients.gradients(model, total), found


def step(
    case: Case, model: Any, group: int, share: dist.ProcessGroup | None, *, self_check: bool = True
) -> tuple[TreeStep, Any]:
    """A step over the rows of one data-parallel group; its gradients stay those of this rank."""
    rows = Rows.of(SHAPES.get(case.shapes[group], []))
    num_groups = len(case.shapes)
    is_critic = case.model == CRITIC

    def loss(outputs: EdgeOutputs, members: Sequence[int]) -> tuple[torch.Tensor, None]:
        total = outputs[VALUES if is_critic else LOG_PROBS].sum() * 0
        start = 0
        for row in members:
            stop = start + int(np.diff(rows.offsets)[row])
            if is_critic:
                values_t, entropy_t = outputs[VALUES][start:stop], torch.zeros(stop - start)
            else:
                values_t, entropy_t = outputs[LOG_PROBS][start : stop - 1], outputs[ENTROPY][start : stop - 1]
            total = total + row_loss(values_t, entropy_t, 100 * group + row, is_coupled=case.is_coupled)
            start = stop
        # Ranks average their gradients.
        return total * num_groups, None

    collectives = CountedCollectives(model) if case.is_sharded else None
    context = replace(StepContext.of(model, sequence_parallel=share), collectives=collectives)
    options = TreeOptions(mode="tree", max_tokens=case.max_tokens, self_check=self_check)
    tree_step = TreeStep(model, options, context=context)
    outputs = (VALUES,) if is_critic else (LOG_PROBS, ENTROPY)
    return tree_step, tree_step.run(rows, loss, outputs=outputs, is_separable=not case.is_coupled)


def averaged(model: Any) -> dict[str, torch.Tensor]:
    """Gradients averaged over all ranks, as a data-parallel host does."""
    gradients = {}
    for name, parameter in model.named_parameters():
        if not parameter.requires_grad:
            continue
        gradient = torch.zeros_like(parameter) if parameter.grad is None else parameter.grad
        if hasattr(gradient, "full_tensor"):
            gradients[name] = gradient.full_tensor()
            continue
        dist.all_reduce(gradient)
        gradients[name] = gradient / dist.get_world_size()
    return gradients


assert_equal_gradients = partial(equal_gradients.assert_equal_gradients, slack=4)
Found = tuple[dict[str, torch.Tensor], torch.Tensor | None, float | None]
"""Gradients averaged over all ranks, log-probs or values of the rank's rows, and what the self-check saw."""


def assert_rows_alone(case: Case, size: int, of_ranks: Sequence[Found]) -> None:
    """Every rank, of which so many share tokens, found what the rows give alone."""
    expected, values = rows_alone(case.model, case.shapes, case.is_coupled)
    counts = [len(SHAPES.get(shape, [])) for shape in case.shapes]
    for rank, (gradients, got, error) in enumerate(of_ranks):
        group = rank // size
        own = values[sum(counts[:group]) : sum(counts[: group + 1])]
        if own:
            torch.testing.assert_close(got, torch.cat(own), rtol=1e-5, atol=1e-5)
            assert error is not None and error < 1e-4
        assert_equal_gradients(gradients, expected)


def groups_of(rank: int, size: int) -> dist.ProcessGroup:
    """The ranks that share tokens with this one, so many of them."""
    world = dist.get_world_size()
    return [dist.new_group(list(range(first, first + size))) for first in range(0, world, size)][rank // size]


def rank_main(rank: int, cases: Sequence[tuple[int, Case]]) -> list[Found]:
    """Run cases, each with the number of ranks that share tokens."""
    shares = {size: groups_of(rank, size) for size in sorted({size for size, _ in cases})}
    found = []
    for size, case in cases:
        model = prepare(build(case.model), is_sharded=case.is_sharded)
        tree_step, result = step(case, model, rank // size, shares[size])
        outputs = result.outputs.present().get(VALUES if case.model == CRITIC else LOG_PROBS)
        found.append((averaged(model), outputs, tree_step.self_check.error))
    return found
