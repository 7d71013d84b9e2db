"""Rows with images in verl's FSDP2 engine train as stock verl trains them alone, whole and cut, the tower too.

So do they on two ranks, of which perhaps one has images, or that share the rows' tokens.
"""

from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from engine_harness import ALONE, FLAGS, LORA, build_engine, with_whole_masks
from equivalence import LOSS, assert_equal_gradients, assert_equal_runs, run, wanted_positions
from image_batches import picture_batch, reading_model
from image_rows import SHAPES, PictureRow, log_probs_alone
from rank_engines import KEPT, as_one_rank, assert_gradients_of_ranks, empty_batch
from rank_processes import run_ranks
from tensordict import TensorDict
from verl.utils import tensordict_utils as tu
from verl.workers.config import FSDPActorConfig
from verl.workers.utils.losses import sft_loss
from verl_losses import critic_loss

from tree_rl.tree.forest import RowError
from tree_rl.verl_plugin.options import TreeConfig
from tree_rl.verl_plugin.refusals.refusal import UnsupportedFeatureError

APART = [one for name, rows in SHAPES.items() if name != "images_side_by_side" for one in rows]
"""All hostile shapes as one batch: more rows, and images in many of them."""


def tree_engine(path: Path, budget: int, **settings: Any) -> Any:
    return build_engine(path, tree=TreeConfig(mode="auto", max_tokens=budget), **settings)


@pytest.mark.parametrize(
    ("family", "settings", "budgets"),
    (
        ("qwen3_vl", {}, (1000, 16)),
        ("qwen3_vl", {"model": {**LORA, "target_modules": "all-linear", "enable_gradient_checkpointing": True}}, (16,)),
        pytest.param("qwen3_5", {}, (1000, 16), marks=pytest.mark.slow),
    ),
)
def test_an_update_is_stock_verls_on_rows_alone(
    image_models: dict[str, Path], family: str, settings: dict[str, Any], budgets: tuple[int, ...]
) -> None:
    path, model = image_models[family], reading_model(image_models[family])
    stock = run(build_engine(path, tree=None, **settings), picture_batch(model, APART, **FLAGS, **ALONE), LOSS)
    wanted = wanted_positions(picture_batch(model, APART))
    assert any("visual" in name for name in stock["gradients"])
    for budget in budgets:
        got = run(tree_engine(path, budget, **settings), picture_batch(model, APART, **FLAGS), LOSS)
        assert_equal_runs(stock, got, wanted, ("log_probs", "entropy"))
        assert 0 < got["metrics"]["tree/self_check_error"].aggregate() < 1e-4


def test_families_whose_attention_verl_replaces_by_flash_attention(image_models: dict[str, Path]) -> None:
    # Stock verl's rows of this family need flash attention: transformers' own rows alone are the yardstick.
    model = reading_model(image_models["qwen2_5_vl"])

    def data(**flags: Any) -> TensorDict:
        return with_whole_masks(picture_batch(model, APART, **flags))

    wanted = wanted_positions(data())
    expected = log_probs_alone(model, APART)
    (-expected[wanted].sum() / wanted.sum()).backward()
    gradients = {name: one.grad for name, one in model.named_parameters()}
    loss = partial(sft_loss, config=FSDPActorConfig(strategy="fsdp2", rollout_n=1, ppo_micro_batch_size_per_gpu=1))
    for budget in (1000, 16):
        got = run(tree_engine(image_models["qwen2_5_vl"], budget), data(**FLAGS), loss)
        found = got["model_output"]["log_probs"].values()
        torch.testing.assert_close(found[wanted], expected.detach()[wanted], rtol=2e-5, atol=2e-5)
        assert_equal_gradients(gradients, got["gradients"])


def test_a_critic_reads_images(image_models: dict[str, Path]) -> None:
    model = reading_model(image_models["qwen3_vl"])
    data = partial(picture_batch, model, APART, **FLAGS)
    stock = run(build_engine(image_models["qwen3_vl"], tree=None, value=True), data(**ALONE), critic_loss())
    got = run(tree_engine(image_models["qwen3_vl"], 16, value=True), data(), critic_loss())
    assert_equal_runs(stock, got, torch.ones(len(data()["input_ids"].values()), dtype=torch.bool), ("values",))


def with_inputs(data: TensorDict, row_number: int, **inputs: Any) -> TensorDict:
    given = [tu.unwrap_non_tensor_data(one) for one in data["multi_modal_inputs"]]
    given[row_number] = {**given[row_number], **inputs}
    tu.assign_non_tensor_stack(data, "multi_modal_inputs", given)
    return data


def test_what_is_no_image_is_refused_by_row(image_models: dict[str, Path]) -> None:
    model, rows = reading_model(image_models["qwen3_vl"]), SHAPES["with_and_without_images"]
    engine = tree_engine(image_models["qwen3_vl"], 1000)
    video = with_inputs(picture_batch(model, rows), 1, pixel_values_videos=torch.zeros(16, 96))
    with pytest.raises(UnsupportedFeatureError, match=r"row 1 carries multimodal inputs besides images \(pixel_val"):
        run(engine, video, LOSS)
    moved = picture_batch(model, rows)
    moved["position_ids"].unbind()[2][3] += 1
    with pytest.raises(UnsupportedFeatureError, match="row 2 has no image, but position_ids of images"):
        run(engine, moved, LOSS)
    image = {"pixel_values": torch.zeros(16, 96), "image_grid_thw": torch.tensor([[1, 4, 4]])}
    with pytest.raises(RowError, match=r"row 1 \(uid g\): has 0 image tokens, but its 1 images need 4"):
        run(engine, with_inputs(picture_batch(model, rows), 1, **image), LOSS)


MIXED, SCREENS = SHAPES["with_and_without_images"], SHAPES["a_sliding_window_of_screens"]
DEALS: dict[str, tuple[list[PictureRow], ...]] = {
    "images_on_one_rank": (SCREENS, MIXED[1:]),
    "a_rank_without_rows": ([], [*SCREENS, *SHAPES["two_images"]]),
    "unequal_images": ([*MIXED, *SHAPES["one_image_in_many_places"]], SHAPES["image_in_a_branch"]),
    "shared_tokens": ([*MIXED, *SCREENS, *SHAPES["branch_directly_after_an_image"]],),
}
RUNS: list[tuple[str, dict[str, Any]]] = [
    *((deal, {}) for deal in ("images_on_one_rank", "a_rank_without_rows", "unequal_images")),
    *(("unequal_images", KEPT), ("shared_tokens", {"ulysses_sequence_parallel_size": 2})),
]
"""Deal, options of the engine."""


def batch_of(reader: Any, deal: str, share: int, **flags: Any) -> TensorDict:
    rows, total = DEALS[deal][share], sum(map(len, DEALS[deal]))
    settings = {"calculate_entropy": True, "global_batch_size": total, **flags}
    return picture_batch(reader, rows, seed=share, **settings) if rows else empty_batch()


def rank_main(rank: int, model: Path) -> dict[str, list[dict[str, torch.Tensor]]]:
    """Gradients of every run of a deal, whole and cut."""
    reader, found = reading_model(model), {deal: [] for deal in DEALS}
    for deal, options in RUNS:
        engine = build_engine(model, tree=TreeConfig(mode="tree"), engine=options)
        for budget in (1000, 5):
            engine.step.options = TreeConfig(mode="tree", max_tokens=budget)
            found[deal].append(run(engine, batch_of(reader, deal, rank % len(DEALS[deal])), LOSS)["gradients"])
    return found


@pytest.fixture(scope="module")
def two_ranks(image_models: dict[str, Path]) -> list[dict[str, list[dict[str, torch.Tensor]]]]:
    return run_ranks(rank_main, 2, image_models["qwen3_vl"])


@pytest.mark.parametrize("deal", DEALS)
def test_two_ranks_train_as_one(image_models: dict[str, Path], two_ranks: Any, deal: str) -> None:
    reader = reading_model(image_models["qwen3_vl"])
    parts = [batch_of(reader, deal, share, **ALONE) for share, rows in enumerate(DEALS[deal]) if rows]
    _, expected = as_one_rank(image_models["qwen3_vl"], parts)
    assert any("visual" in name for name in expected)
    for of_rank in two_ranks:
        for gradients in of_rank[deal]:
            assert_gradients_of_ranks(expected, gradients)
