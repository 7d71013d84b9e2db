"""Liger's layers on a GPU in bf16: a tree is no further from stock float32 than rows alone with the same layers are."""

from typing import Any

import numpy as np
import pytest
import torch
from equal_gradients import gradients
from fused_models import ALL
from tiny_sizes import DELTA_NET, changed, sizes
from transformers import AutoModelForCausalLM, PretrainedConfig

from tree_rl.models import use_tree_attention
from tree_rl.models.fused_layers import ROTARY_KERNEL, use_liger_layers
from tree_rl.models.routers.trace import RouterHooks, RouterTrace
from tree_rl.models.tree_inputs import TreeInputs
from tree_rl.training.loss.edges import forest_log_probs
from tree_rl.training.rows_alone import branch_log_probs
from tree_rl.tree.forest import Forest

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")]
CUDA = torch.device("cuda")
VOCAB = 500
WIDE = {"hidden_size": 256, "intermediate_size": 512, "head_dim": 64, "max_position_embeddings": 2048}
SIZES = sizes(vocab_size=VOCAB, num_hidden_layers=None, pad_token_id=None, initializer_range=0.05, **WIDE)
LINEAR = DELTA_NET | {"linear_key_head_dim": 64, "linear_value_head_dim": 64}
SEEDS = 5


def larger(config: PretrainedConfig) -> PretrainedConfig:
    """Sizes that kernels are made for. Every token visits all experts: half precision chooses others near a tie."""
    known, changes = config.to_dict(), {**SIZES, **LINEAR, "moe_intermediate_size": 128, "sliding_window": 64}
    changes["num_experts_per_tok"] = known.get("num_experts") or known.get("num_local_experts")
    changes["shared_expert_intermediate_size"] = 128
    return changed(config, **{key: value for key, value in changes.items() if known.get(key) is not None})


def rows_of(seed: int) -> list[list[int]]:
    """Branches, stubs, a strict prefix and a second root."""
    draw = np.random.default_rng(seed)
    trunk = draw.integers(1, VOCAB, 150).tolist()
    cuts = ((150, 40), (150, 70), (90, 33), (90, 0), (40, 65), (0, 129))
    return [trunk[:cut] + draw.integers(1, VOCAB, more).tolist() for cut, more in cuts]


def build(config: PretrainedConfig, dtype: torch.dtype) -> Any:
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(
        changed(config), attn_implementation="eager", experts_implementation="eager", dtype=torch.float32
    )
    return model.to(device=CUDA, dtype=dtype).train()


def gradient(model: Any, log_probs: torch.Tensor, seed: int) -> torch.Tensor:
    """All gradients in one vector, float32."""
    weights = torch.from_numpy(np.random.default_rng(seed).normal(size=len(log_probs))).to(log_probs)
    return torch.cat([one.float().flatten() for one in gradients(model, (log_probs * weights).sum()).values()])


@pytest.mark.parametrize("family", ALL)
def test_bf16_is_no_further_from_float32_than_rows_are(family: str) -> None:
    from liger_kernel.backends import resolve_impl

    config = larger(ALL[family])
    exact, rows_model, tree_model = (build(config, t) for t in (torch.float32, torch.bfloat16, torch.bfloat16))
    for model in (rows_model, tree_model):
        use_liger_layers(model, device=CUDA)
    use_tree_attention(tree_model)
    assert resolve_impl("rope", device=CUDA).impl_name == ROTARY_KERNEL[1]
    errors = []
    for seed in range(SEEDS):
        rows = rows_of(seed)
        truth = gradient(exact, branch_log_probs(exact, rows), seed)
        alone = gradient(rows_model, branch_log_probs(rows_model, rows), seed)
        tree = gradient(tree_model, forest_log_probs(tree_model, Forest.from_rows(rows), device=CUDA), seed)
        errors.append([float((got - truth).norm() / truth.norm()) for got in (alone, tree)])
    rows_error, tree_error = np.array(errors).T
    print(f"{family}: bf16 gradient error against stock float32: rows alone {rows_error}, tree {tree_error}")
    excess = tree_error - rows_error
    assert excess.mean() <= 2 * excess.std(ddof=1) / SEEDS**0.5
    assert rows_error.mean() < 0.1


def test_routers_are_traced_through_fused_experts() -> None:
    forest = Forest.from_rows(rows_of(0))
    chosen = []
    for fused in (False, True):
        model = build(changed(larger(ALL["qwen3_moe"]), num_experts_per_tok=1), torch.float32)
        if fused:
            use_liger_layers(model, device=CUDA)
        use_tree_attention(model)
        RouterHooks(model)
        trace = RouterTrace()
        with torch.no_grad():
            model(**TreeInputs.from_forest(forest, CUDA, router_trace=trace).model_kwargs())
        chosen.append(trace.chosen())
    # One layer: nothing in front of the router but a norm and attention, whose rounding may tip a tie.
    assert float((chosen[0] == chosen[1]).float().mean()) > 0.99
