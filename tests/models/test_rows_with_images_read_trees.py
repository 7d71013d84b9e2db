"""Rows with images as trees: gradients of all parameters, the tower's too, are those of transformers on rows alone; the
tower runs once per image of a forest, whole and in partitions that cut images."""

from typing import Any

import numpy as np
import pytest
import torch
from equal_gradients import assert_equal_gradients
from image_rows import SHAPES, Picture, PictureRow, images_of, log_probs_alone, positions, row, row_images, text
from peft import LoraConfig, get_peft_model
from wrapped_models import wrapped_config, wrapped_model

from tree_rl.models import check_model, use_edge_head, use_tree_attention
from tree_rl.models.own_forwards import restore_own_forwards
from tree_rl.training import EdgeOutputs, Rows, TreeOptions, TreeStep
from tree_rl.training.row_images import RowImages
from tree_rl.tree.forest import Forest, RowError

FAMILIES = (("qwen2_5_vl", False), ("qwen3_vl", True))
"""Family, and whether layers run again in the backward."""
OTHERS = ("qwen2_vl", "qwen2_5_vl", "qwen3_vl", "qwen3_vl_moe", "qwen3_5", "qwen3_5_moe")
WHOLE = 10_000
ADAPTED = "base_model.model."
"""Prefix of a parameter's name in a model with adapters."""


def gradients(model: Any) -> dict[str, torch.Tensor]:
    return {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}


def weights(rows: list[PictureRow]) -> torch.Tensor:
    draw = np.random.default_rng(1)
    return torch.from_numpy(draw.normal(size=sum(len(one.tokens) for one in rows))).float()


def train_alone(model: Any, rows: list[PictureRow]) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
    found = log_probs_alone(model, rows)
    (found * weights(rows)).sum().backward()
    expected = gradients(model)
    model.zero_grad()
    return found.detach(), expected


def train(step: TreeStep, rows: list[PictureRow], images: RowImages, *, is_separable: bool = True) -> torch.Tensor:
    weight = weights(rows)
    starts = np.cumsum([0, *(len(one.tokens) for one in rows)])

    def loss(outputs: EdgeOutputs, members: Any) -> Any:
        own = torch.cat([weight[starts[one] : starts[one + 1]] for one in members])
        return (outputs.log_probs * own).sum(), []

    result = step.run(Rows.of([one.tokens for one in rows], images=images), loss, is_separable=is_separable)
    return result.outputs.log_probs


def build(family: str, *, checkpointing: bool = False) -> Any:
    model = wrapped_model(wrapped_config(family, initializer_range=0.2)).train()
    # Engines of other tests in this process replace forwards of its classes.
    restore_own_forwards(model)
    if checkpointing:
        model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
    return model


@pytest.mark.parametrize(
    ("family", "checkpointing"),
    (*FAMILIES, *(pytest.param(one, is_on, marks=pytest.mark.slow) for one in OTHERS for is_on in (False, True))),
)
def test_gradients_are_those_of_rows_alone(family: str, checkpointing: bool) -> None:
    model = build(family, checkpointing=checkpointing)
    alone = {}
    for name, rows in SHAPES.items():
        alone[name] = (*train_alone(model, rows), images_of(model, rows))
        assert any("visual" in parameter for parameter in alone[name][1])
    check_model(model)
    use_tree_attention(model)
    use_edge_head(model)
    seen: list[int] = []
    model.base_model.visual.register_forward_pre_hook(lambda module, args: seen.append(len(args[0])))
    for number, (name, rows) in enumerate(SHAPES.items()):
        expected, gradient, images = alone[name]
        patches = sum(one.height * one.width for one in {picture for one in rows for picture in one.pictures})
        for max_tokens, is_separable in ((WHOLE, True), ((16, True), (3, False))[(number + checkpointing) % 2]):
            step = TreeStep(model, TreeOptions(mode="tree", max_tokens=max_tokens, self_check=False))
            seen.clear()
            found = train(step, rows, images, is_separable=is_separable)
            assert seen == [patches], name
            torch.testing.assert_close(found, expected, rtol=1e-5, atol=2e-5)
            assert_equal_gradients(gradients(model), gradient)
            model.zero_grad()


def test_rows_share_an_image_only_if_patches_grid_and_positions_agree() -> None:
    model = build("qwen2_5_vl")

    def unique(rows: list[PictureRow], images: RowImages | None = None) -> int:
        own = Rows.of([one.tokens for one in rows], images=images or images_of(model, rows))
        return Forest.from_rows([one.tokens for one in rows], merge_key=own.merge_keys(by_group=True)).num_unique

    trunk, end = text(1, 5), text(2, 3)
    picture = Picture(seed=1)
    assert unique([row(trunk, picture, end)] * 2) == 12
    assert unique([row(trunk, picture, end), row(trunk, Picture(seed=2), end)]) == 12 + 7
    wide, tall = Picture(seed=4, width=8), Picture(seed=4, height=8)
    assert unique([row(trunk, wide, end), row(trunk, tall, end)]) == 16 + 11
    rows = [row(trunk, picture, end)] * 2
    moved = [positions(model, one).clone() for one in rows]
    moved[1][2, 7:] += 1
    shifted = row_images(rows, moved)
    assert unique(rows, shifted) == 12 + 5


@pytest.mark.parametrize(
    ("pieces", "message"),
    (
        ((text(1, 3), [90, 90]), "row 1: has 2 image tokens, but its 0 images need 0; a row cannot end or branch"),
        ((text(1, 3), Picture(seed=1), [90]), "row 1: has 5 image tokens, but its 1 images need 4"),
    ),
)
def test_a_row_that_ends_or_branches_inside_an_image_is_refused(pieces: tuple[Any, ...], message: str) -> None:
    rows = [row(text(1, 3), Picture(seed=1)), row(*pieces)]
    with pytest.raises(RowError, match=message):
        row_images(rows, [np.zeros((3, len(one.tokens))) for one in rows])


def test_an_image_whose_tokens_are_interrupted_is_refused() -> None:
    one = row(Picture(seed=1))
    tokens, how = [[5, 90, 90, 6, 90, 90]], {"image_token": 90, "merge_size": 2}
    with pytest.raises(RowError, match="row 0: other tokens interrupt those of an image at token 1"):
        RowImages.of(tokens, [one.pixel_values], [one.grid_thw], [np.zeros((3, 6))], **how)


@pytest.mark.parametrize("targets", (["q_proj", "v_proj", "up_proj"], "all-linear"))
def test_adapters_train_with_and_without_adapters_in_the_tower(targets: Any) -> None:
    rows = [one for name in ("two_images", "branch_directly_after_an_image") for one in SHAPES[name]]
    model = get_peft_model(build("qwen3_vl"), LoraConfig(r=4, target_modules=targets))
    model.enable_input_require_grads()
    inner = model.get_base_model()
    for name, parameter in model.named_parameters():
        if "lora_B" in name:
            torch.nn.init.normal_(parameter, std=0.1)
    expected, gradient = train_alone(inner, rows)
    assert any("visual" in name for name in gradient) == (targets == "all-linear")
    images = images_of(inner, rows)
    use_tree_attention(inner)
    use_edge_head(inner)
    for max_tokens in (WHOLE, 3):
        found = train(TreeStep(model, TreeOptions(mode="tree", max_tokens=max_tokens)), rows, images)
        torch.testing.assert_close(found, expected, rtol=1e-5, atol=2e-5)
        found_gradients = {name.removeprefix(ADAPTED): one for name, one in gradients(model).items()}
        assert found_gradients.keys() == gradient.keys()
        assert_equal_gradients(found_gradients, gradient)
        model.zero_grad()


@pytest.mark.parametrize("rows", ([SHAPES["same_text_other_image"][0]], SHAPES["with_and_without_images"]))
def test_the_self_check_compares_rows_with_images(rows: list[PictureRow]) -> None:
    model = build("qwen3_vl")
    images = images_of(model, rows)
    use_tree_attention(model)
    step = TreeStep(model, TreeOptions(mode="tree"))
    train(step, rows, images)
    assert step.self_check.error is not None and 0 < step.self_check.error < 1e-4
