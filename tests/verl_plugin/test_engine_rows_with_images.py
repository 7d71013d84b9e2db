"""Rows with images in verl's FSDP2 engine train as stock verl trains them alone, whole and cut, the tower too."""

from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from engine_harness import build_engine, with_whole_masks
from equivalence import (
    ALONE,
    FLAGS,
    LOSS,
    assert_equal_gradients,
    assert_equal_runs,
    critic_loss,
    run,
    wanted_positions,
)
from image_batches import picture_batch, reading_model
from image_rows import SHAPES, log_probs_alone
from tensordict import TensorDict
from verl.utils import tensordict_utils as tu
from verl.workers.config import FSDPActorConfig
from verl.workers.utils.losses import sft_loss
from wrapped_models import wrapped_config, wrapped_model

from tree_rl.tree.forest import RowError
from tree_rl.verl_plugin.options import TreeConfig
from tree_rl.verl_plugin.refusals.refusal import UnsupportedFeatureError

APART = [one for name, rows in SHAPES.items() if name != "images_side_by_side" for one in rows]
"""All hostile shapes as one batch: more rows, and images in many of them."""


@pytest.fixture(scope="module")
def paths(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    root = tmp_path_factory.mktemp("models")
    for family in ("qwen3_vl", "qwen2_5_vl", "qwen3_5"):
        wrapped_model(wrapped_config(family, initializer_range=0.2)).save_pretrained(root / family)
    return {path.name: path for path in root.iterdir()}


def tree_engine(path: Path, budget: int, **settings: Any) -> Any:
    return build_engine(path, tree=TreeConfig(mode="auto", max_tokens=budget), **settings)


LORA = {"lora_rank": 4, "lora_alpha": 8, "target_modules": "all-linear"}


@pytest.mark.parametrize(
    ("family", "settings", "budgets"),
    (
        ("qwen3_vl", {}, (1000, 16)),
        ("qwen3_vl", {"model": {**LORA, "enable_gradient_checkpointing": True}}, (16,)),
        pytest.param("qwen3_5", {}, (1000, 16), marks=pytest.mark.slow),
    ),
)
def test_an_update_is_stock_verls_on_rows_alone(
    paths: dict[str, Path], family: str, settings: dict[str, Any], budgets: tuple[int, ...]
) -> None:
    model = reading_model(paths[family])
    stock = run(build_engine(paths[family], tree=None, **settings), picture_batch(model, APART, **FLAGS, **ALONE), LOSS)
    wanted = wanted_positions(picture_batch(model, APART))
    assert any("visual" in name for name in stock["gradients"])
    for budget in budgets:
        got = run(tree_engine(paths[family], budget, **settings), picture_batch(model, APART, **FLAGS), LOSS)
        assert_equal_runs(stock, got, wanted, ("log_probs", "entropy"))
        assert 0 < got["metrics"]["tree/self_check_error"].aggregate() < 1e-4


def test_families_whose_attention_verl_replaces_by_flash_attention(paths: dict[str, Path]) -> None:
    # Stock verl's rows of this family need flash attention: transformers' own rows alone are the yardstick.
    model = reading_model(paths["qwen2_5_vl"])

    def data(**flags: Any) -> TensorDict:
        return with_whole_masks(picture_batch(model, APART, **flags))

    wanted = wanted_positions(data())
    expected = log_probs_alone(model, APART)
    (-expected[wanted].sum() / wanted.sum()).backward()
    gradients = {name: one.grad for name, one in model.named_parameters()}
    loss = partial(sft_loss, config=FSDPActorConfig(strategy="fsdp2", rollout_n=1, ppo_micro_batch_size_per_gpu=1))
    for budget in (1000, 16):
        got = run(tree_engine(paths["qwen2_5_vl"], budget), data(**FLAGS), loss)
        found = got["model_output"]["log_probs"].values()
        torch.testing.assert_close(found[wanted], expected.detach()[wanted], rtol=2e-5, atol=2e-5)
        assert_equal_gradients(gradients, got["gradients"])


def test_a_critic_reads_images(paths: dict[str, Path]) -> None:
    model = reading_model(paths["qwen3_vl"])
    data = partial(picture_batch, model, APART, **FLAGS)
    stock = run(build_engine(paths["qwen3_vl"], tree=None, value=True), data(**ALONE), critic_loss())
    got = run(tree_engine(paths["qwen3_vl"], 16, value=True), data(), critic_loss())
    assert_equal_runs(stock, got, torch.ones(len(data()["input_ids"].values()), dtype=torch.bool), ("values",))


def with_inputs(data: TensorDict, row_number: int, **inputs: Any) -> TensorDict:
    given = [tu.unwrap_non_tensor_data(one) for one in data["multi_modal_inputs"]]
    given[row_number] = {**given[row_number], **inputs}
    tu.assign_non_tensor_stack(data, "multi_modal_inputs", given)
    return data


def test_what_is_no_image_is_refused_by_row(paths: dict[str, Path]) -> None:
    model, rows = reading_model(paths["qwen3_vl"]), SHAPES["with_and_without_images"]
    engine = tree_engine(paths["qwen3_vl"], 1000)
    video = with_inputs(picture_batch(model, rows), 1, pixel_values_videos=torch.zeros(16, 96))
    with pytest.raises(
        UnsupportedFeatureError, match=r"row 1 carries multimodal inputs besides images \(pixel_values_vid"
    ):
        run(engine, video, LOSS)
    moved = picture_batch(model, rows)
    moved["position_ids"].unbind()[2][3] += 1
    with pytest.raises(UnsupportedFeatureError, match="row 2 has no image, but position_ids of images"):
        run(engine, moved, LOSS)
    image = {"pixel_values": torch.zeros(16, 96), "image_grid_thw": torch.tensor([[1, 4, 4]])}
    with pytest.raises(RowError, match=r"row 1 \(uid g\): has 0 image tokens, but its 1 images need 4"):
        run(engine, with_inputs(picture_batch(model, rows), 1, **image), LOSS)
