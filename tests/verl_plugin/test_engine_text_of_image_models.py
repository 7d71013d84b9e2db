"""Published checkpoints that also read images train on rows of text in verl's FSDP2 engine as stock verl does on rows
alone: `*ForConditionalGeneration`, loaded by verl's own way, whole and cut."""

import sys
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed
from engine_harness import build_engine, nested, ppo_batch
from equivalence import (
    ALONE,
    FLAGS,
    LOSS,
    alone,
    assert_equal_gradients,
    assert_trains_as,
    run,
    wanted_positions,
)
from hostile_rows import SHAPES
from rank_engines import assert_two_ranks_step_as_one
from tensordict import TensorDict
from transformers import AutoModelForImageTextToText
from verl.utils import tensordict_utils as tu
from verl.workers.utils.losses import sft_loss

from tree_rl.models import UnsupportedModelError
from tree_rl.training.rows_alone import branch_log_probs
from tree_rl.verl_plugin.options import TreeConfig
from tree_rl.verl_plugin.refusals.refusal import UnsupportedFeatureError

sys.path.insert(0, str(Path(__file__).parents[1] / "models"))
from wrapped_models import wrapped_config, wrapped_model

NAMED = ("qwen3_5", "gemma3", "mistral3")


def save(path: Path, family: str, *, tied: bool = False, **text: Any) -> Path:
    """A tiny checkpoint as published ones are."""
    wrapped_model(wrapped_config(family, tied=tied, **text)).save_pretrained(path)
    return path


@pytest.fixture(scope="module")
def paths(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    return {family: save(tmp_path_factory.mktemp(family), family) for family in NAMED}


def with_axes(data: TensorDict) -> TensorDict:
    """Positions as verl's agent loop gives them to models with rotary axes: of text, and of an image's three."""
    rows = [torch.arange(len(ids)).expand(4, -1).contiguous() for ids in data["input_ids"].unbind()]
    data["position_ids"] = torch.nested.as_nested_tensor(rows, layout=torch.jagged)
    return data


def with_type_ids(data: TensorDict, key: str, row_with_image: int | None = None) -> TensorDict:
    """Rows as a processor returns them: 0 for each token of a text, 1 for those of an image."""
    ids = [{key: torch.zeros(1, len(one), dtype=torch.long)} for one in data["input_ids"].unbind()]
    if row_with_image is not None:
        ids[row_with_image][key][0, 1] = 1
    tu.assign_non_tensor_stack(data, "multi_modal_inputs", ids)
    return data


def compare(path: Path, *, budgets: tuple[int, ...] = (16, 1000), **settings: Any) -> dict[str, Any]:
    """Both engines on the same rows; what stock verl found."""
    model = settings.pop("model", {})
    shape = settings.pop("shape", "branches")
    stock = build_engine(path, tree=None, model=model, **settings)
    expected = alone(stock, SHAPES[shape])
    for budget in budgets:
        tree = build_engine(path, tree=TreeConfig(mode="auto", max_tokens=budget), model=model, **settings)
        assert_trains_as(expected, tree, SHAPES[shape])
    return expected


@pytest.mark.parametrize("shape", ("strict_prefix", "branch_at_63_64_65"))
@pytest.mark.parametrize("family", NAMED)
def test_an_update_whole_and_in_partitions(paths: dict[str, Path], family: str, shape: str) -> None:
    compare(paths[family], shape=shape)


@pytest.mark.parametrize("family", ("qwen3_vl", "qwen3_vl_moe", "glm46v", "gemma4", "internvl", "lfm2_vl"))
def test_other_families(tmp_path: Path, family: str) -> None:
    compare(save(tmp_path, family))


@pytest.mark.parametrize("family", ("qwen2_5_vl", "glm4v"))
def test_families_whose_attention_verl_replaces_by_flash_attention(tmp_path: Path, family: str) -> None:
    # Stock verl's own text rows of these families need flash attention, and fail in transformers 5: the yardstick is
    # the model before an engine has replaced its classes' forwards.
    path = save(tmp_path, family)
    rows = [np.array(one.tokens) for one in SHAPES["branches"]]
    expected = branch_log_probs(AutoModelForImageTextToText.from_pretrained(path), rows)
    for budget in (16, 1000):
        data = with_axes(ppo_batch(SHAPES["branches"], **FLAGS))
        got = run(build_engine(path, tree=TreeConfig(mode="auto", max_tokens=budget)), data, LOSS)
        wanted = wanted_positions(data)
        found = got["model_output"]["log_probs"].values()[wanted]
        torch.testing.assert_close(found, expected[wanted].to(found.dtype), rtol=2e-5, atol=2e-5)


@pytest.mark.parametrize("family", NAMED)
def test_a_head_tied_to_the_embedding(tmp_path: Path, family: str) -> None:
    expected = compare(save(tmp_path, family, tied=True))
    assert "lm_head.weight" not in expected["gradients"]


@pytest.mark.parametrize("family", NAMED)
def test_gradient_checkpointing(paths: dict[str, Path], family: str) -> None:
    compare(paths[family], shape="comb", model={"enable_gradient_checkpointing": True})


@pytest.mark.parametrize("targets", ("all-linear", ["q_proj", "v_proj", "up_proj"]))
@pytest.mark.parametrize("family", NAMED)
def test_adapters(paths: dict[str, Path], family: str, targets: Any) -> None:
    lora = {"lora_rank": 4, "lora_alpha": 8, "target_modules": targets}
    expected = compare(paths[family], model={**lora, "enable_gradient_checkpointing": True})
    assert all("lora" in name for name in expected["gradients"])


@pytest.mark.parametrize("family", NAMED)
def test_log_probs_of_a_reference_policy(paths: dict[str, Path], family: str) -> None:
    found = []
    for tree, flags in ((None, ALONE), (TreeConfig(mode="auto", max_tokens=16), {})):
        engine = build_engine(paths[family], tree=tree)
        with engine.eval_mode(disable_auto_offload=True), torch.no_grad():
            output = engine.forward_backward_batch(ppo_batch(SHAPES["comb"], **FLAGS, **flags), None, forward_only=True)
        found.append(output["model_output"]["log_probs"].values())
    wanted = wanted_positions(ppo_batch(SHAPES["comb"]))
    torch.testing.assert_close(found[1][wanted], found[0][wanted], rtol=2e-5, atol=2e-5)


@pytest.mark.parametrize("family", NAMED)
def test_supervised_training(paths: dict[str, Path], family: str) -> None:
    rows = SHAPES["branches"]
    found = []
    for tree, flags in ((None, ALONE), (TreeConfig(mode="auto", max_tokens=16), {})):
        data = ppo_batch(rows, **flags)
        data["loss_mask"] = nested([torch.tensor([0] * one.prompt + list(one.mask)) for one in rows])
        found.append(run(build_engine(paths[family], tree=tree), data, partial(sft_loss, config=None)))
    assert sum(found[1]["loss"]) == pytest.approx(sum(found[0]["loss"]), rel=1e-4)
    assert_equal_gradients(found[0]["gradients"], found[1]["gradients"])


@pytest.mark.parametrize(
    ("family", "key"), (("gemma3", "token_type_ids"), ("qwen3_5", "mm_token_type_ids"), ("mistral3", "token_type_ids"))
)
def test_rows_that_say_they_are_text_train_and_rows_with_images_are_refused(
    paths: dict[str, Path], family: str, key: str
) -> None:
    tree = build_engine(paths[family], tree=TreeConfig(mode="auto", max_tokens=16))
    plain = run(tree, ppo_batch(SHAPES["branches"], **FLAGS), LOSS)
    said = run(tree, with_axes(with_type_ids(ppo_batch(SHAPES["branches"], **FLAGS), key)), LOSS)
    assert_equal_gradients(plain["gradients"], said["gradients"])
    with pytest.raises(UnsupportedFeatureError, match=rf"row 1 carries multimodal inputs \({key}\); trees run rows of"):
        run(tree, with_type_ids(ppo_batch(SHAPES["branches"], **FLAGS), key, row_with_image=1), LOSS)
    data = with_axes(ppo_batch(SHAPES["branches"], **FLAGS))
    data["position_ids"].unbind()[2][1:] += 1
    with pytest.raises(UnsupportedFeatureError, match="row 2 carries position_ids of images"):
        run(tree, data, LOSS)


def test_the_self_check_compares_with_one_row_alone(paths: dict[str, Path]) -> None:
    tree = build_engine(paths["qwen3_5"], tree=TreeConfig(mode="auto", max_tokens=1000))
    got = run(tree, with_axes(ppo_batch(SHAPES["branches"], **FLAGS)), LOSS)
    assert 0 < got["metrics"]["tree/self_check_error"].aggregate() < 1e-4


@pytest.mark.parametrize(
    ("family", "text", "reason"),
    (
        ("gemma3", {"attention_dropout": 0.1}, r"attention_dropout=0\.1: .* set model\.override_config\.text_config\."),
        ("paligemma", {}, "tokens of a text see tokens behind them"),
        ("mllama", {}, "attend to images alone"),
    ),
)
def test_what_cannot_be_exact_is_refused_with_the_reason(
    tmp_path: Path, family: str, text: dict[str, Any], reason: str
) -> None:
    with pytest.raises(UnsupportedModelError, match=reason):
        build_engine(save(tmp_path, family, **text), tree=TreeConfig())


@pytest.mark.parametrize("family", NAMED[:2])
def test_two_ranks_take_the_two_steps_of_stock_verl_on_one(tmp_path: Path, family: str) -> None:
    save(tmp_path / "model", family)
    assert_two_ranks_step_as_one(tmp_path)
