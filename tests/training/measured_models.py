"""Tiny checkpointed models of every kind, rows of hostile shapes, and steps that take given ways to save memory."""

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import torch
from peft import LoraConfig, get_peft_model
from tiny_sizes import DELTA_NET, ROPE, VOCAB, config_of, sizes
from transformers import AutoModelForCausalLM, AutoModelForTokenClassification

from tree_rl.cost.memory.model import MemorySaving
from tree_rl.models import use_edge_head, use_tree_attention
from tree_rl.training import EdgeOutputs, Rows, StepResult, TreeOptions, TreeStep
from tree_rl.training.loss.outputs import LOG_PROBS, VALUES
from tree_rl.training.planner import StepPlan

LAYERS, HIDDEN = 4, 32
SIZES: dict[str, Any] = sizes(
    intermediate_size=48, num_hidden_layers=LAYERS, max_position_embeddings=512, attention_dropout=0.0
)
EXPERTS = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16, "norm_topk_prob": True}
EXPERTS |= {"mlp_only_layers": [1]}
MROPE = {**ROPE, "partial_rotary_factor": 0.5, "mrope_section": [1, 1, 0]}
KINDS = ("dense", "experts", "gated_delta_net", "lora", "critic")


def build(kind: str, *, checkpointing: bool = True, dtype: torch.dtype = torch.float32, **changes: Any) -> Any:
    """A random model in train mode, the same weights at every call; `changes` of its configuration."""
    torch.manual_seed(0)
    config: Any = config_of("qwen3", **SIZES | changes)
    if kind == "experts":
        config = config_of("qwen3_moe", **SIZES | EXPERTS | changes)
    elif kind == "gated_delta_net":
        config = config_of("qwen3_5_text", **SIZES | {"initializer_range": 0.06}, **DELTA_NET, rope_parameters=MROPE)
    if kind == "critic":
        config.num_labels, config.classifier_dropout, config.hidden_dropout = 1, 0.0, 0.0
    of_kind = AutoModelForTokenClassification if kind == "critic" else AutoModelForCausalLM
    how = {"attn_implementation": "sdpa", "experts_implementation": "eager"}
    model: Any = of_kind.from_config(config, **how, dtype=dtype)
    if checkpointing:
        model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
    use_tree_attention(model)
    if kind != "critic":
        use_edge_head(model)
    if kind == "lora":
        wanted = ["q_proj", "v_proj", "gate_proj", "down_proj"]
        model = get_peft_model(model, LoraConfig(r=2, lora_alpha=4, target_modules=wanted, init_lora_weights=False))
        model.enable_input_require_grads()
    return model.train()


def hostile_rows() -> list[list[int]]:
    """Two trees: branches at 63, 64 and 65 tokens with a strict prefix and a copy, and a comb; ids below VOCAB."""
    draw = np.random.default_rng(0)
    deep, spine = draw.integers(1, VOCAB, 70).tolist(), [7, *draw.integers(1, VOCAB, 20).tolist()]
    branches = [deep[:cut] + draw.integers(1, VOCAB, 3 + cut % 4).tolist() for cut in (63, 64, 65)]
    comb = [spine[: 3 + 4 * tooth] + draw.integers(1, VOCAB, 2 + tooth).tolist() for tooth in range(5)]
    return [*branches, deep, deep[:30], deep, *comb]


def measured_step(model: Any, options: TreeOptions, saving: MemorySaving) -> TreeStep:
    """A step whose forests all save memory in the given way."""
    step = TreeStep(model, options)
    plan_of = step.planner.plan

    def plan(*asked: Any, **flags: Any) -> StepPlan:
        plan = plan_of(*asked, **flags)
        return replace(plan, batches=tuple(replace(batch, saving=saving) for batch in plan.batches))

    step.planner.plan = plan  # type: ignore[method-assign]
    return step


def trained(
    step: TreeStep, model: Any, rows: list[list[int]] | None = None, *, infers: bool = False
) -> tuple[dict[str, torch.Tensor], StepResult]:
    """What every trained parameter gets of one update, and its result; an inference may come first."""
    ids = hostile_rows() if rows is None else rows
    output = VALUES if hasattr(model, "score") else LOG_PROBS
    weight_F = torch.from_numpy(np.random.default_rng(3).normal(size=sum(map(len, ids)))).float()
    starts = np.cumsum([0, *map(len, ids)])

    def loss(outputs: EdgeOutputs, members: Sequence[int]) -> tuple[torch.Tensor, dict[str, float]]:
        mine = np.concatenate([np.arange(starts[row], starts[row + 1]) for row in members])
        values_f = outputs[output]
        return (weight_F[mine].to(values_f) * values_f + 0.1 * values_f.square()).sum(), {}

    model.zero_grad()
    if infers:
        step.infer(Rows.of(ids), outputs=(output,))
    result = step.run(Rows.of(ids), loss, outputs=(output,), is_separable=True)
    return {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}, result


def gradients(
    model: Any, saving: MemorySaving, *, max_tokens: int | None = None, rows: list[list[int]] | None = None
) -> dict[str, torch.Tensor]:
    """Of one step that saves memory in the given way."""
    options = TreeOptions(mode="tree", max_tokens=max_tokens, self_check=False)
    return trained(measured_step(model, options, saving), model, rows)[0]
