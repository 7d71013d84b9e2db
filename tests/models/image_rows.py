"""Rows with images for tiny models that read them, in shapes that each could go wrong, and the same rows run alone."""

from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import numpy as np
import torch

from tree_rl.models.images import merge_size
from tree_rl.training.row_images import RowImages

IMAGE_TOKEN = 90
START, END = 92, 93
PATCH = 3 * 2 * 4 * 4
"""Values of a patch: channels, frames, height, width."""


@dataclass(frozen=True, kw_only=True)
class Picture:
    """One image: random patches by seed."""

    seed: int
    height: int = 4
    width: int = 4

    @property
    def pixels(self) -> torch.Tensor:
        return torch.randn(self.height * self.width, PATCH, generator=torch.Generator().manual_seed(self.seed))

    @property
    def tokens(self) -> list[int]:
        return [IMAGE_TOKEN] * (self.height * self.width // 4)


@dataclass(frozen=True, kw_only=True)
class PictureRow:
    """A row: pieces of text and pictures."""

    pieces: tuple[list[int] | Picture, ...]

    @property
    def tokens(self) -> list[int]:
        return [token for piece in self.pieces for token in (piece if isinstance(piece, list) else piece.tokens)]

    @property
    def pictures(self) -> list[Picture]:
        return [piece for piece in self.pieces if isinstance(piece, Picture)]

    @property
    def has_neighbours(self) -> bool:
        return any(isinstance(left, Picture) and isinstance(right, Picture) for left, right in pairwise(self.pieces))

    @property
    def pixel_values(self) -> torch.Tensor | None:
        return torch.cat([picture.pixels for picture in self.pictures]) if self.pictures else None

    @property
    def grid_thw(self) -> torch.Tensor | None:
        return torch.tensor([[1, one.height, one.width] for one in self.pictures]) if self.pictures else None


def text(seed: int, length: int) -> list[int]:
    return np.random.default_rng(seed).integers(3, 89, length).tolist()


def row(*pieces: list[int] | Picture) -> PictureRow:
    return PictureRow(pieces=pieces)


def shapes() -> dict[str, list[PictureRow]]:
    trunk, other = text(1, 5), text(2, 4)
    first, second, third = (Picture(seed=seed) for seed in (1, 2, 3))
    wide, tall = Picture(seed=4, width=8), Picture(seed=4, height=8)
    ends = [text(10 + number, 3 + number) for number in range(4)]
    return {
        "same_text_other_image": [row(trunk, one, ends[0]) for one in (first, second, first)],
        "same_image_other_grid": [row(trunk, one, ends[0]) for one in (wide, tall, wide)],
        "image_in_the_shared_prefix": [row(trunk, wide, other, end) for end in ends],
        "image_in_a_branch": [row(trunk, ends[0], first, other), row(trunk, ends[0], other), row(trunk, first)],
        "two_images": [row(trunk, first, other, one, ends[end]) for one, end in ((second, 0), (third, 0), (second, 1))],
        "branch_directly_after_an_image": [row(trunk, wide, ends[0]), row(trunk, wide, ends[1]), row(trunk, wide)],
        "with_and_without_images": [row(trunk, first, ends[0]), row(trunk, ends[1]), row(trunk, ends[2]), row(other)],
        "images_side_by_side": [row(trunk, first, first, other), row(trunk, first, second, other)],
        "one_image_in_many_places": [
            *(row(*before, first, other) for before in ((trunk, ends[0]), (trunk, ends[1]), (first, other))),
            row(second, other),
        ],
        "a_sliding_window_of_screens": [
            row(trunk, [START], one, [END], ends[end], [START], two, [END], ends[end + more])
            for one, end, two, more in ((first, 0, wide, 1), (wide, 1, third, 1), (wide, 1, tall, 2))
        ],
    }


SHAPES = shapes()


def positions(model: Any, one: PictureRow) -> torch.Tensor:
    """int64 [3, tokens], as transformers computes them; it cannot tell images side by side apart, which get those of
    text."""
    ids = torch.tensor([one.tokens])
    if one.has_neighbours:
        return torch.arange(ids.shape[1]).expand(3, -1)
    found, _ = model.base_model.get_rope_index(ids, (ids == IMAGE_TOKEN).int(), image_grid_thw=one.grid_thw)
    return found[:, 0]


def row_images(rows: list[PictureRow], positions_B: list[Any]) -> RowImages:
    tokens, pixels, grids = zip(*((one.tokens, one.pixel_values, one.grid_thw) for one in rows), strict=True)
    return RowImages.of(tokens, pixels, grids, positions_B, image_token=IMAGE_TOKEN, merge_size=2)


def images_of(model: Any, rows: list[PictureRow]) -> RowImages:
    assert merge_size(model.config) == 2
    return row_images(rows, [positions(model, one) for one in rows])


def log_probs_alone(model: Any, rows: list[PictureRow]) -> torch.Tensor:
    """Log-probs of every next token, row after row, from transformers' forward of each row by itself, which computes
    positions; 0 at a row's end."""
    pieces = []
    for one in rows:
        ids = torch.tensor([one.tokens])
        seen = {}
        if one.pictures:
            dtype = next(model.parameters()).dtype
            seen = {"pixel_values": one.pixel_values.to(dtype), "image_grid_thw": one.grid_thw}
            if one.has_neighbours:
                seen["position_ids"] = positions(model, one)[:, None]
            else:
                seen["mm_token_type_ids"] = (ids == IMAGE_TOKEN).int()
        found = model(input_ids=ids, use_cache=False, **seen).logits[0, :-1].log_softmax(-1)
        pieces += [found.gather(1, ids[0, 1:, None]).squeeze(1), found.new_zeros(1)]
    return torch.cat(pieces)
