"""Rows with images as verl's agent loops hand them to its engines."""

from pathlib import Path
from typing import Any

import torch
from engine_harness import Row, nested, ppo_batch
from image_rows import IMAGE_TOKEN, PictureRow, positions
from tensordict import TensorDict
from transformers import AutoModelForImageTextToText
from verl.utils import tensordict_utils as tu

from tree_rl.models.own_forwards import restore_own_forwards


def reading_model(path: str | Path) -> Any:
    """The model as transformers runs it, whatever an engine of this process has replaced."""
    model = AutoModelForImageTextToText.from_pretrained(path)
    restore_own_forwards(model)
    return model


def picture_batch(model: Any, rows: list[PictureRow], **flags: Any) -> TensorDict:
    """With `multi_modal_inputs` and positions with four axes, which `model` computes; tokens of images do not train."""
    of_ppo = []
    for number, one in enumerate(rows):
        mask = [int(token != IMAGE_TOKEN) for token in one.tokens[2:]]
        of_ppo.append(Row(tokens=one.tokens, prompt=2, mask=mask, advantage=(-1.0) ** number))
    data = ppo_batch(of_ppo, **flags)
    axes = [torch.cat([torch.arange(len(one.tokens))[None], positions(model, one)]) for one in rows]
    data["position_ids"] = nested([axis.contiguous() for axis in axes])
    tu.assign_non_tensor_stack(data, "multi_modal_inputs", [inputs_of(one) for one in rows])
    return data


def inputs_of(one: PictureRow) -> dict[str, torch.Tensor]:
    if not one.pictures:
        return {}
    images = {"pixel_values": one.pixel_values, "image_grid_thw": one.grid_thw}
    return {**images, "images_seqlens": one.grid_thw[:, 1:].prod(-1)}
