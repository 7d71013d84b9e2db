"""Where a row's images are, and keys of their content: the trainer's trees need them, but not the patches.

A row's tag holds them. In the trainer an image's tokens get its key as their id, so that rows share them only if the
image is the same.
"""

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from tree_rl.models.images import image_hash
from tree_rl.rollout.gateway.tokens.images import FIRST_NUMBER

IMAGE_SPANS = "image_spans"
"""Tag of a row with images, and its entry in `extra_fields`."""

Span = tuple[int, int, int]
"""First token of an image, first token after it, key."""


def spans_of_images(
    token_ids: Sequence[int], inputs: Mapping[str, Any], *, image_token: int | None, merge_size: int
) -> list[Span]:
    """The images of a row; none if its tokens and images do not match, which the engine refuses.

    `inputs` are verl's `multi_modal_inputs`; `merge_size` is the number of patches per token in height and in width.
    """
    pixels, grids = inputs.get("pixel_values"), inputs.get("image_grid_thw")
    if pixels is None or grids is None or image_token is None:
        return []
    tokens = np.flatnonzero(np.asarray(token_ids) == image_token)
    patches = np.asarray(grids).prod(axis=1)
    ends = np.cumsum(patches // merge_size**2)
    if ends[-1] != len(tokens):
        return []
    of_images = zip(np.split(tokens, ends[:-1]), np.asarray(grids), pixels.split(patches.tolist()), strict=True)
    # Keys are above all ids of tokens, and int32 as they are.
    return [
        (int(own[0]), int(own[-1]) + 1, FIRST_NUMBER + image_hash(grid, image) % FIRST_NUMBER)
        for own, grid, image in of_images
    ]


def with_image_keys(token_ids: np.ndarray, spans: Sequence[Span]) -> np.ndarray:
    """The row with the keys of its images instead of their tokens."""
    if not spans:
        return token_ids
    keyed = token_ids.copy()
    for start, stop, key in spans:
        keyed[start:stop] = key
    return keyed
