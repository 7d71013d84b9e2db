"""Mixture-of-Experts models on trees: gradients of rows alone, and experts that see unique tokens only."""

import numpy as np
import pytest
import torch
from moe_models import BIASED, FAMILIES, SHAPES, assert_equal_gradients, build, gradients

from tree_rl.models import check_model, use_tree_attention
from tree_rl.training.rows_alone import branch_log_probs
from tree_rl.training.whole import forest_log_probs
from tree_rl.tree.forest import Forest

ALL = {**FAMILIES, "glm4_moe": BIASED}


def weighted(log_probs_F: torch.Tensor, seed: int = 0) -> torch.Tensor:
    weight_F = np.random.default_rng(seed).normal(size=len(log_probs_F))
    # Half of the tokens are context.
    weight_F[1::2] = 0
    return (log_probs_F * torch.from_numpy(weight_F).to(log_probs_F)).sum()


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("family", ALL)
def test_forest_equals_rows_alone(family: str, shape: str) -> None:
    model, rows = build(ALL[family]), SHAPES[shape]
    expected = gradients(model, weighted(branch_log_probs(model, rows)))
    check_model(model)
    use_tree_attention(model)
    got = gradients(model, weighted(forest_log_probs(model, Forest.from_rows(rows))))
    assert_equal_gradients(got, expected)


@pytest.mark.parametrize("experts", ("grouped_mm", "batched_mm"))
@pytest.mark.parametrize("family", ALL)
def test_every_experts_implementation(family: str, experts: str) -> None:
    rows = SHAPES["branches"] + SHAPES["identical_and_strict_prefix"]
    reference = build(ALL[family])
    expected = gradients(reference, weighted(branch_log_probs(reference, rows)))
    model = build(ALL[family], experts=experts)
    use_tree_attention(model)
    got = gradients(model, weighted(forest_log_probs(model, Forest.from_rows(rows))))
    assert_equal_gradients(got, expected)


@pytest.mark.parametrize("family", ALL)
def test_experts_compute_each_unique_token_once(family: str) -> None:
    model, rows = build(ALL[family]), SHAPES["identical_and_strict_prefix"]
    use_tree_attention(model)
    seen: list[int] = []
    for module in model.modules():
        if type(module).__name__.endswith(("Experts", "NaiveMoe")):
            module.register_forward_pre_hook(lambda _, args: seen.append(len(args[0])))
    forest = Forest.from_rows(rows)
    forest_log_probs(model, forest)
    assert seen and set(seen) == {forest.num_unique} == {9}


def test_qwen3_moe_in_float64_is_exact_to_rounding() -> None:
    model, rows = (
        build(FAMILIES["qwen3_moe"], attention="sdpa", dtype=torch.float64),
        SHAPES["branches"] + SHAPES["comb"],
    )
    float64_throughout(model)
    expected = gradients(model, weighted(branch_log_probs(model, rows)))
    use_tree_attention(model)
    got = gradients(model, weighted(forest_log_probs(model, Forest.from_rows(rows))))
    assert_equal_gradients(got, expected, 1e-10)


def float64_throughout(model: torch.nn.Module) -> None:
    """Norms, rotary angles and router of Qwen3-MoE in the dtype of the model; stock code rounds them to float32."""

    def norm(self: torch.nn.Module, hidden: torch.Tensor) -> torch.Tensor:
        return self.weight * hidden * torch.rsqrt(hidden.pow(2).mean(-1, keepdim=True) + self.variance_epsilon)

    def rotary(self: torch.nn.Module, x: torch.Tensor, position_ids: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        angles = position_ids[..., None].double() * self.inv_freq.double()
        both = torch.cat([angles, angles], dim=-1)
        return both.cos(), both.sin()

    def router(self: torch.nn.Module, hidden: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        logits = hidden @ self.weight.T
        top, index = torch.topk(logits.softmax(-1), self.top_k, dim=-1)
        return logits, top / top.sum(-1, keepdim=True), index

    forwards = {"Qwen3MoeRMSNorm": norm, "Qwen3MoeRotaryEmbedding": rotary, "Qwen3MoeTopKRouter": router}
    for module in model.modules():
        if type(module).__name__ in forwards:
            module.forward = forwards[type(module).__name__].__get__(module)
