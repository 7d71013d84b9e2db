"""Mixture-of-Experts models in verl's FSDP2 engine: trees train as stock verl does on rows alone, plus the router
auxiliary loss of all rows where it is asked for."""

from pathlib import Path
from typing import Any

import pytest
import torch
from engine_harness import VOCAB, Row, build_engine, ppo_batch, save_model
from equivalence import actor_loss, assert_equal_gradients, assert_equal_runs, run, wanted_positions
from hostile_rows import shapes
from transformers import (
    AutoModelForCausalLM,
    GptOssConfig,
    MixtralConfig,
    PretrainedConfig,
    Qwen3Config,
    Qwen3MoeConfig,
)
from transformers.models.qwen3_5_moe.configuration_qwen3_5_moe import Qwen3_5MoeTextConfig

from tree_rl.models import UnsupportedModelError
from tree_rl.verl_plugin.options import TreeConfig

SHAPES = shapes()
FLAGS = {"calculate_entropy": True, "return_model_output": True}
ALONE = {"use_dynamic_bsz": False, "micro_batch_size_per_gpu": 1}
EXPERTS, COEF = 6, 0.3
SIZES: dict[str, Any] = {
    "vocab_size": VOCAB,
    "hidden_size": 32,
    "intermediate_size": 24,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "max_position_embeddings": 512,
    "initializer_range": 0.2,
    "num_experts_per_tok": 2,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
ROPE = {"rope_type": "default", "rope_theta": 10000.0}
HYBRID: dict[str, Any] = {
    **{key: value for key, value in SIZES.items() if key != "intermediate_size"},
    "num_experts": EXPERTS,
    "moe_intermediate_size": 16,
    "shared_expert_intermediate_size": 16,
    "initializer_range": 0.1,
    "layer_types": ["linear_attention", "full_attention"],
    "linear_num_value_heads": 4,
    "linear_num_key_heads": 2,
    "linear_key_head_dim": 8,
    "linear_value_head_dim": 8,
}
CONFIGS: dict[str, PretrainedConfig] = {
    "qwen3_moe": Qwen3MoeConfig(**SIZES, num_experts=EXPERTS, moe_intermediate_size=16),
    "mixtral": MixtralConfig(**SIZES, num_local_experts=EXPERTS),
    "gpt_oss": GptOssConfig(**SIZES, num_local_experts=EXPERTS, sliding_window=9, rope_parameters=ROPE),
    "qwen3_5_moe": Qwen3_5MoeTextConfig(**HYBRID),
}
WHOLE = ("branches", "identical", "masks_differ_on_shared_prefix", "temperatures_differ")
"""Shapes that also run in one forward; the others are dense models' business."""
ATTENTION = {"qwen3_moe": "sdpa", "mixtral": "sdpa", "gpt_oss": "eager", "qwen3_5_moe": "sdpa"}


@pytest.fixture(scope="module")
def paths(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    return {name: save_model(tmp_path_factory.mktemp(name), config) for name, config in CONFIGS.items()}


@pytest.fixture(scope="module", params=["qwen3_moe", "mixtral", "gpt_oss"])
def engines(request: pytest.FixtureRequest, paths: dict[str, Path]) -> tuple[Any, Any]:
    """Stock verl's engine and ours on one model."""
    path, attention = paths[request.param], ATTENTION[request.param]
    return (
        build_engine(path, tree=None, attention=attention),
        build_engine(path, tree=TreeConfig(mode="tree"), attention=attention),
    )


@pytest.mark.parametrize("name, capacity", [(name, 5) for name in SHAPES] + [(name, 1000) for name in WHOLE])
def test_trees_train_as_rows_alone(engines: tuple[Any, Any], name: str, capacity: int) -> None:
    stock, tree = engines
    loss = actor_loss("vanilla", "token-mean")
    expected = run(stock, ppo_batch(SHAPES[name], **FLAGS, **ALONE), loss)
    tree.step.options = TreeConfig(mode="tree", max_tokens=capacity)
    got = run(tree, ppo_batch(SHAPES[name], **FLAGS), loss)
    assert_equal_runs(expected, got, wanted_positions(ppo_batch(SHAPES[name])), ("log_probs", "entropy"))


def auxiliary_gradients(path: Path, batch: list[Row]) -> tuple[float, dict[str, torch.Tensor]]:
    """Transformers' own auxiliary loss of all rows in one padded batch, and its gradients."""
    model = AutoModelForCausalLM.from_pretrained(path, attn_implementation="eager", dtype=torch.float32)
    rows = [row.tokens for row in batch]
    longest = max(map(len, rows))
    ids = torch.tensor([row + [0] * (longest - len(row)) for row in rows])
    mask = torch.tensor([[1] * len(row) + [0] * (longest - len(row)) for row in rows])
    loss = model(input_ids=ids, attention_mask=mask, output_router_logits=True, use_cache=False).aux_loss
    loss.backward()
    return loss.item(), {n: torch.zeros_like(p) if p.grad is None else p.grad for n, p in model.named_parameters()}


SHAPE_OF_FAMILY = {"qwen3_moe": "two_groups", "gpt_oss": "comb", "mixtral": "identical", "qwen3_5_moe": "branches"}


@pytest.fixture(scope="module")
def rows_alone(paths: dict[str, Path]) -> dict[str, tuple[dict[str, Any], float, dict[str, torch.Tensor]]]:
    """Stock verl's update of each family, and the auxiliary loss of the same rows with its gradients."""
    loss = actor_loss("vanilla", "token-mean")
    found = {}
    for family, name in SHAPE_OF_FAMILY.items():
        engine = build_engine(paths[family], tree=None, attention=ATTENTION[family])
        stock = run(engine, ppo_batch(SHAPES[name], **FLAGS, **ALONE), loss)
        found[family] = (stock, *auxiliary_gradients(paths[family], SHAPES[name]))
    return found


@pytest.mark.parametrize("checkpointing", (False, True))
@pytest.mark.parametrize("capacity", (5, 20, 1000))
@pytest.mark.parametrize("family", SHAPE_OF_FAMILY)
def test_auxiliary_loss_over_all_rows(
    paths: dict[str, Path], rows_alone: dict[str, Any], family: str, capacity: int, checkpointing: bool
) -> None:
    path, attention, name = paths[family], ATTENTION[family], SHAPE_OF_FAMILY[family]
    loss = actor_loss("vanilla", "token-mean")
    stock, value, auxiliary = rows_alone[family]
    tree = build_engine(
        path,
        tree=TreeConfig(max_tokens=capacity, router_aux_loss_coef=COEF),
        attention=attention,
        model={"enable_gradient_checkpointing": checkpointing},
    )
    got = run(tree, ppo_batch(SHAPES[name], **FLAGS), loss)
    assert sum(got["loss"]) == pytest.approx(sum(stock["loss"]), rel=1e-4, abs=1e-6)
    expected = {key: gradient + COEF * auxiliary[key] for key, gradient in stock["gradients"].items()}
    assert_equal_gradients(expected, got["gradients"])
    metrics = got["metrics"]
    assert metrics["moe/aux_loss"].aggregate() == pytest.approx(value, rel=1e-5)
    assert metrics["moe/counted_anew"].aggregate() == 1


def test_load_is_remembered_until_the_weights_move(paths: dict[str, Path]) -> None:
    engine = build_engine(paths["qwen3_moe"], tree=TreeConfig(max_tokens=20, router_aux_loss_coef=COEF))
    loss = actor_loss("vanilla", "token-mean")
    forwards: list[int] = []
    engine.module.register_forward_pre_hook(lambda *_: forwards.append(1))

    def update(name: str) -> tuple[float, int, dict[str, torch.Tensor]]:
        forwards.clear()
        got = run(engine, ppo_batch(SHAPES[name], **FLAGS), loss)
        return got["metrics"]["moe/counted_anew"].aggregate(), len(forwards), got["gradients"]

    anew, more_forwards, expected = update("two_groups")
    assert anew == 1
    with engine.eval_mode(disable_auto_offload=True):
        engine.infer_batch(ppo_batch(SHAPES["two_groups"], **FLAGS))
    anew, fewer_forwards, got = update("two_groups")
    assert anew == 0 and fewer_forwards < more_forwards
    assert_equal_gradients(expected, got)
    assert update("comb")[0] == 1
    with engine.eval_mode(disable_auto_offload=True):
        engine.infer_batch(ppo_batch(SHAPES["two_groups"], **FLAGS))
    engine.optimizer_step()
    assert update("two_groups")[0] == 1


def test_a_coefficient_of_zero_only_counts(paths: dict[str, Path]) -> None:
    loss = actor_loss("vanilla", "token-mean")
    runs = [
        run(build_engine(paths["mixtral"], tree=tree), ppo_batch(SHAPES["comb"], **FLAGS), loss)
        for tree in (TreeConfig(mode="tree"), TreeConfig(router_aux_loss_coef=0.0))
    ]
    for name, gradient in runs[0]["gradients"].items():
        assert torch.equal(gradient, runs[1]["gradients"][name]), name
    metrics = runs[1]["metrics"]
    assert "moe/aux_loss" not in metrics and "moe/load_max_over_mean" not in runs[0]["metrics"]
    assert metrics["moe/load_max_over_mean"].aggregate() > 1 > metrics["moe/load_min_over_mean"].aggregate()


def test_reported_load_counts_rows_not_unique_tokens(paths: dict[str, Path]) -> None:
    rows = SHAPES["identical"] + SHAPES["strict_prefix"]
    model = AutoModelForCausalLM.from_pretrained(paths["mixtral"])
    count_LE = torch.zeros(2, EXPERTS)
    for row in rows:
        logits = model(input_ids=torch.tensor([row.tokens]), output_router_logits=True).router_logits
        for layer, logits_LE in enumerate(logits):
            count_LE[layer] += torch.bincount(logits_LE.topk(2).indices.flatten(), minlength=EXPERTS)
    engine = build_engine(paths["mixtral"], tree=TreeConfig(router_aux_loss_coef=0.0))
    metrics = run(engine, ppo_batch(rows, **FLAGS), actor_loss("vanilla", "token-mean"))["metrics"]
    ratio_LE = count_LE / count_LE.mean(1, keepdim=True)
    assert metrics["moe/load_max_over_mean"].aggregate() == pytest.approx(float(ratio_LE.max()))
    assert metrics["moe/load_min_over_mean"].aggregate() == pytest.approx(float(ratio_LE.min()))
    assert metrics["moe/idle_experts"].aggregate() == int((count_LE == 0).sum())


def test_a_dense_model_refuses_the_coefficient(tmp_path: Path) -> None:
    sizes = {key: value for key, value in SIZES.items() if key != "num_experts_per_tok"}
    path = save_model(tmp_path, Qwen3Config(**sizes))
    with pytest.raises(UnsupportedModelError, match=r"has no experts .* unset tree\.router_aux_loss_coef"):
        build_engine(path, tree=TreeConfig(router_aux_loss_coef=0.1))


def test_the_models_own_auxiliary_loss_is_refused_with_the_key_to_change(tmp_path: Path) -> None:
    config = Qwen3MoeConfig(**SIZES, num_experts=EXPERTS, moe_intermediate_size=16, output_router_logits=True)
    with pytest.raises(UnsupportedModelError, match=r"output_router_logits=False, and tree\.router_aux_loss_coef"):
        build_engine(save_model(tmp_path, config), tree=TreeConfig())
