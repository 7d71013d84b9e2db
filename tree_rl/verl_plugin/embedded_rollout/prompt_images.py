"""Images of prompts for the embedded rollout engine: where they are, their positions, and the tower's features.

Legend: P tokens of a prompt, Q new tokens of a forward, p image tokens among them, C hidden size, S stacked features.
"""

from collections import OrderedDict
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from tree_rl.models.images import ImagePatches, image_hash, merge_size, run_tower
from tree_rl.training.row_images import RowImages
from tree_rl.tree.forest import RowError

KEPT_IMAGES = 64
"""Images whose features are kept for later prompts."""
FIRST_KEY = 1 << 32
"""Smallest key of an image; ids of tokens are smaller."""


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class PromptImages:
    """Images of one prompt."""

    images: RowImages
    """The prompt as the only row."""
    keys: tuple[int, ...]
    """A hash of each image's content and grid."""

    @classmethod
    def of(
        cls, model: Any, prompt_ids: list[int], pixel_values: torch.Tensor, grid_thw: torch.Tensor
    ) -> "PromptImages":
        """Read images as the model's processor returns them.

        Raises:
            RowError: image tokens of the prompt and images do not match, or no token separates two images.
        """
        ids_1P = torch.tensor([prompt_ids])
        is_image_1P = ids_1P == model.config.image_token_id
        sizes = (grid_thw.prod(dim=1) // merge_size(model.config) ** 2).tolist()
        if is_image_1P.sum() != sum(sizes):
            raise RowError(f"prompt: has {is_image_1P.sum()} image tokens, but its images need {sum(sizes)}")
        starts = int(is_image_1P[0].int().diff(prepend=torch.zeros(1)).eq(1).sum())
        if starts != len(sizes):
            raise RowError(
                f"prompt: has {len(sizes)} images in {starts} places; transformers computes no positions of images "
                "side by side"
            )
        position_31P, _ = model.base_model.get_rope_index(ids_1P, is_image_1P.int(), image_grid_thw=grid_thw)
        images = RowImages.of(
            [prompt_ids],
            [pixel_values],
            [grid_thw],
            [position_31P[:, 0]],
            image_token=model.config.image_token_id,
            merge_size=merge_size(model.config),
            labels=["prompt"],
        )
        keys = zip(images.grid_U3, images.pixel_values, strict=True)
        return cls(images=images, keys=tuple(FIRST_KEY + image_hash(grid, pixels) for grid, pixels in keys))

    def keyed(self, prompt_ids: list[int]) -> np.ndarray:
        """int64 [P], the prompt with an image's key instead of its tokens' ids: prompts share exactly equal entries."""
        is_image = self.images.image_F >= 0
        return np.where(is_image, np.array(self.keys)[self.images.image_F], prompt_ids)

    def positions(self, start: int) -> np.ndarray:
        """int64 [3, Q], rotary positions of the prompt's tokens from `start` on."""
        return self.images.position_AF[:, start:]

    def position_behind(self, generated: int) -> np.ndarray:
        """int64 [3, 1], rotary position of the token behind the prompt and some generated tokens."""
        return np.full((3, 1), self.images.position_AF.max() + 1 + generated)


class ImageFeatures:
    """The tower's features of images, kept by content until the weights change."""

    def __init__(self, model: Any) -> None:
        self._model = model
        self._kept: OrderedDict[int, torch.Tensor] = OrderedDict()

    def forget(self) -> None:
        """Drop all features."""
        self._kept.clear()

    def of_tokens(self, prompt: PromptImages, start: int) -> tuple[np.ndarray, torch.Tensor] | None:
        """The image tokens of a prompt from token `start` on; None if there are none.

        Returns:
            int64 [p], their distances from the prompt's end, 1 for its last token, and features [S, p, C].
        """
        images = prompt.images
        tokens = start + np.flatnonzero(images.image_F[start:] >= 0)
        if not len(tokens):
            return None
        image_p, place_p = images.image_F[tokens], images.place_F[tokens]
        pieces = [self._features(prompt, image)[:, place_p[image_p == image]] for image in dict.fromkeys(image_p)]
        # An image can come again after another, so that pieces, one for each image, are not in the tokens' order.
        order = np.concatenate([np.flatnonzero(image_p == image) for image in dict.fromkeys(image_p)])
        return len(images.image_F) - tokens, torch.cat(pieces, dim=1)[:, np.argsort(order)]

    def _features(self, prompt: PromptImages, image: int) -> torch.Tensor:
        key, parameter = prompt.keys[image], next(self._model.parameters())
        if key not in self._kept:
            patches = ImagePatches(
                pixel_values=prompt.images.pixel_values[image].to(parameter.device, parameter.dtype),
                grid_thw=torch.from_numpy(prompt.images.grid_U3[image : image + 1]).to(parameter.device),
            )
            self._kept[key] = run_tower(self._model, patches).last_hidden_state
            if len(self._kept) > KEPT_IMAGES:
                self._kept.popitem(last=False)
        self._kept.move_to_end(key)
        return self._kept[key]
