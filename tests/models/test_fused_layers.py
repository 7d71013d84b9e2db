"""Liger's fused layers: one model changes and no other, and a tree of it equals its rows, and those of stock layers.

The kernels are Liger's, in Triton's interpreter, in float32.
"""

import copy
import os
import sys
from typing import Any
from unittest.mock import patch

import moe_models
import pytest
import torch
from dense_models import SIZES
from equal_gradients import Run, assert_equal_gradients, with_gradients
from fused_models import ALL, DENSE, SPARSE
from tiny_sizes import changed
from transformers import LlamaConfig, Olmo2Config, OlmoeConfig, PretrainedConfig

from tree_rl.models import UnsupportedModelError, check_model, use_tree_attention
from tree_rl.models.fused_layers import ROTARY_KERNEL, TESTED, check_liger, remove_liger_layers, use_liger_layers
from tree_rl.training.loss.edges import forest_log_probs
from tree_rl.training.rows_alone import branch_log_probs
from tree_rl.tree.forest import Forest

CPU = torch.device("cpu")
ROWS = [[5, 6, 7, 8], [5, 6, 9, 4], [5, 6], [3]]
"""Branches, a strict prefix, a single token, two roots."""


def build(config: PretrainedConfig) -> Any:
    return moe_models.build(config).train()


def read_trees(model: Any) -> None:
    check_model(model)
    use_tree_attention(model, impl="reference", delta_rule_impl="reference")


def names_of_layers(model: Any) -> dict[str, str]:
    return {name: module._get_name() for name, module in model.named_modules()}


def assert_same(got: Run, expected: Run) -> None:
    torch.testing.assert_close(got[0], expected[0], rtol=1e-5, atol=1e-5)
    assert_equal_gradients(got[1], expected[1], floor=1e-1)


def test_families_are_those_of_the_tests() -> None:
    assert {config.model_type for config in ALL.values()} == TESTED
    assert all(family == config.model_type for family, config in ALL.items())


@pytest.mark.parametrize("family", ALL)
def test_layers_are_those_that_stock_verl_replaces(family: str, liger: None) -> None:
    from liger_kernel.transformers.monkey_patch import _apply_liger_kernel_to_instance

    tree, critic, plain = build(ALL[family]), build(ALL[family]).base_model, build(ALL[family])
    unfused = names_of_layers(plain)
    use_liger_layers(tree, device=CPU)
    use_liger_layers(critic, device=CPU)
    assert names_of_layers(plain) == names_of_layers(build(ALL[family])) == unfused
    ours = names_of_layers(tree)
    prefix = f"{tree.base_model_prefix}."
    assert names_of_layers(critic) == {n.removeprefix(prefix): v for n, v in ours.items() if n.startswith(prefix)} | {
        "": unfused[tree.base_model_prefix]
    }
    assert any("LigerRMSNorm" in name for name in ours.values())
    # As verl's engine calls it; what it changes in the modelling file is undone.
    with patch.dict(vars(sys.modules[type(plain).__module__])):
        _apply_liger_kernel_to_instance(model=plain, fused_linear_cross_entropy=False, swiglu=True)
    assert ours == names_of_layers(plain)
    assert type(tree).forward is type(plain).forward and "forward" not in vars(tree)
    remove_liger_layers(tree)
    assert names_of_layers(tree) == unfused


@pytest.mark.parametrize(
    "family",
    ["qwen3", "gemma2", *(pytest.param(f, marks=pytest.mark.slow) for f in ALL if f not in ("qwen3", "gemma2"))],
)
def test_tree_equals_rows_and_rows_without_liger(family: str, liger: None) -> None:
    model = build(ALL[family])
    unfused = with_gradients(model, branch_log_probs(model, ROWS))
    use_liger_layers(model, device=CPU)
    rows = with_gradients(model, branch_log_probs(model, ROWS))
    assert_same(rows, unfused)
    read_trees(model)
    assert_same(with_gradients(model, forest_log_probs(model, Forest.from_rows(ROWS))), rows)


def test_other_models_of_the_process_run_as_before(liger: None) -> None:
    from liger_kernel.transformers import rope

    other, fused = build(DENSE["llama"]), build(DENSE["llama"])
    expected = with_gradients(other, branch_log_probs(other, ROWS))
    modelling = sys.modules[type(other).__module__]
    classes = {name: value for name, value in vars(modelling).items() if isinstance(value, type)}
    use_liger_layers(fused, device=CPU)
    use_liger_layers(build(DENSE["llama"]), device=CPU)
    assert {name: value for name, value in vars(modelling).items() if isinstance(value, type)} == classes
    with patch.object(rope, "dispatch", wraps=rope.dispatch) as rotate:
        after = with_gradients(other, branch_log_probs(other, ROWS))
        rotate.assert_not_called()
        branch_log_probs(fused, ROWS[:1])
        rotate.assert_called_once()
        # The layer tells its thread, and takes it back also where it fails.
        with pytest.raises(TypeError):
            fused.model.layers[0](torch.zeros(1, 2, 32), position_embeddings=None)
        branch_log_probs(other, ROWS[:1])
        rotate.assert_called_once()
    assert torch.equal(after[0], expected[0])
    assert all(torch.equal(after[1][name], gradient) for name, gradient in expected[1].items())


def test_the_rotary_kernel_takes_any_number_of_tokens_unless_another_is_asked_for(
    liger: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    name, kernel = ROTARY_KERNEL
    for asked, expected in (("", kernel), ("nvidia-cutedsl", "nvidia-cutedsl")):
        monkeypatch.setenv(name, asked)
        if not asked:
            monkeypatch.delenv(name)
        use_liger_layers(build(DENSE["llama"]), device=CPU)
        assert os.environ[name] == expected


def test_a_copy_takes_the_layers_along_and_gives_them_back_alone(liger: None) -> None:
    model = build(DENSE["qwen3"])
    expected = branch_log_probs(model, ROWS[:1])
    use_liger_layers(model, device=CPU)
    fused = branch_log_probs(model, ROWS[:1])
    wide = copy.deepcopy(model)
    assert torch.equal(branch_log_probs(wide, ROWS[:1]), fused)
    remove_liger_layers(wide)
    assert torch.equal(branch_log_probs(wide, ROWS[:1]), expected)
    # Float64 has no kernels of Liger's.
    assert branch_log_probs(wide.double(), ROWS[:1]).dtype == torch.float64
    assert torch.equal(branch_log_probs(model, ROWS[:1]), fused)


def test_recomputed_layers_rotate_as_in_the_forward(liger: None) -> None:
    model = build(DENSE["llama"])
    use_liger_layers(model, device=CPU)
    read_trees(model)
    forest = Forest.from_rows(ROWS)
    expected = with_gradients(model, forest_log_probs(model, forest))
    model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
    assert_same(with_gradients(model, forest_log_probs(model, forest)), expected)


@pytest.mark.parametrize(
    ("config", "deterministic", "reason"),
    (
        (OlmoeConfig(**SIZES, num_experts=4), False, "no layers for model_type=olmoe"),
        (Olmo2Config(), False, "not tested with liger-kernel's layers for model_type=olmo2"),
        (LlamaConfig(**SIZES, hidden_act="gelu"), False, "computes silu or swish, the model hidden_act=gelu"),
        (changed(SPARSE["qwen3_moe"], num_hidden_layers=2, mlp_only_layers=[1]), False, "experts in every layer"),
        (SPARSE["mixtral"], True, "breaks fsdp_config.full_determinism"),
    ),
)
def test_what_liger_would_change_is_refused_by_name(
    config: PretrainedConfig, deterministic: bool, reason: str, liger: None
) -> None:
    with pytest.raises(UnsupportedModelError, match=f"^model.use_liger=true: .*{reason}.*; set model.use_liger=false"):
        check_liger(config, device=CPU, deterministic=deterministic)


def test_a_cpu_is_refused_by_name(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)
    with pytest.raises(
        UnsupportedModelError, match=r"model\.use_liger=true: (Liger's kernels need a CUDA|liger-kernel is not)"
    ):
        use_liger_layers(build(DENSE["llama"]), device=CPU)
