"""Images of the rows of one step, and which of their tokens belong to which image.

Two rows share an image's tokens only if patches, grid and positions are equal. Legend: B rows, F flat tokens, N unique
tokens of a forest, U distinct images, A rotary axes.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
import torch

from tree_rl.models.images import ImagePatches, TokensWithImages
from tree_rl.tree.forest import Forest, RowError

SAMPLED = 64
"""Values of an image by which candidates for an equal one are found."""


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class RowImages:
    """Images of rows."""

    pixel_values: tuple[torch.Tensor, ...]
    """Patches of each of U images, as the model's processor returns them."""
    grid_U3: np.ndarray
    """int64 [U, 3], patches in time, height and width."""
    tokens_U: np.ndarray
    """int64 [U], tokens of each image."""
    image_F: np.ndarray
    """int64 [F], image that a token belongs to, -1 for text."""
    place_F: np.ndarray
    """int64 [F], index of a token among its image's tokens, 0 for text."""
    position_AF: np.ndarray
    """int64 [A, F], rotary positions of all tokens."""

    @classmethod
    def of(
        cls,
        token_ids: Sequence[Sequence[int] | np.ndarray],
        pixel_values: Sequence[torch.Tensor | None],
        grid_thw: Sequence[torch.Tensor | None],
        position_ids: Sequence[torch.Tensor | np.ndarray],
        *,
        image_token: int,
        merge_size: int,
        labels: Sequence[str] | None = None,
    ) -> "RowImages":
        """Images of rows, as a processor returns them.

        Args:
            token_ids: B rows.
            pixel_values: per row the patches of its images, one after the other; None for a row of text.
            grid_thw: per row int64 [images, 3]; None for a row of text.
            position_ids: per row integer [A, tokens], as the model's `get_rope_index` returns them.
            image_token: id of an image's tokens, `config.image_token_id`.
            merge_size: patches per image token, in height and in width.
            labels: names of the rows in messages.

        Raises:
            RowError: image tokens and images of a row do not match, an image's tokens are interrupted, or positions do
                not fit the row; names it.
        """
        known = _Distinct()
        images, places = [], []
        for row, ids in enumerate(token_ids):
            label = f"row {row}" if labels is None else labels[row]
            pixels, given = pixel_values[row], grid_thw[row]
            has_none = pixels is None or given is None
            grids = np.zeros((0, 3), dtype=np.int64) if has_none else np.asarray(given, dtype=np.int64)
            found = [] if pixels is None else known.number(pixels, grids, label)
            sizes = grids.prod(axis=1) // merge_size**2
            image, place = _of_tokens(np.asarray(ids) == image_token, found, sizes, label)
            if np.asarray(position_ids[row]).shape[1:] != image.shape:
                raise RowError(f"{label}: has {len(image)} tokens and positions {np.shape(position_ids[row])}")
            images.append(image)
            places.append(place)
        grid_U3 = np.array(known.grids, dtype=np.int64).reshape(-1, 3)
        return cls(
            pixel_values=tuple(known.pixels),
            grid_U3=grid_U3,
            tokens_U=grid_U3.prod(axis=1) // merge_size**2,
            image_F=np.concatenate(images),
            place_F=np.concatenate(places),
            position_AF=np.concatenate([np.asarray(one, dtype=np.int64) for one in position_ids], axis=1),
        )

    def take(self, flat: np.ndarray) -> "RowImages":
        """The tokens at some flat positions."""
        return replace(
            self, image_F=self.image_F[flat], place_F=self.place_F[flat], position_AF=self.position_AF[:, flat]
        )

    def of_forest(self, forest: Forest, flat: np.ndarray) -> "ForestImages | None":
        """Images of a forest whose rows are at the given flat positions; None if it has none."""
        image_F = self.image_F[flat]
        used = np.unique(image_F[image_F >= 0])
        if not len(used):
            return None
        first_feature = np.zeros(len(self.tokens_U), dtype=np.int64)
        first_feature[used] = np.cumsum(self.tokens_U[used]) - self.tokens_U[used]
        index = forest.row_index.values
        feature_N = np.empty(forest.num_unique, dtype=np.int64)
        feature_N[index] = np.where(image_F >= 0, first_feature[image_F] + self.place_F[flat], -1)
        position_AN = np.empty((len(self.position_AF), forest.num_unique), dtype=np.int64)
        position_AN[:, index] = self.position_AF[:, flat]
        return ForestImages(images=self, used=used, feature_N=feature_N, position_AN=position_AN)


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class ForestImages:
    """Images of a forest, each once."""

    images: RowImages
    """Images of the whole call."""
    used: np.ndarray
    """int64, the images that the forest reads, ascending."""
    feature_N: np.ndarray
    """int64 [N], index of an image token's feature among those of the used images, -1 for text."""
    position_AN: np.ndarray
    """int64 [A, N], rotary positions."""

    def patches(self, device: torch.device) -> ImagePatches:
        """The used images on the device."""
        return ImagePatches(
            pixel_values=torch.cat([self.images.pixel_values[image] for image in self.used]).to(device),
            grid_thw=torch.from_numpy(self.images.grid_U3[self.used]).to(device),
        )

    def tokens(self, features_SMC: torch.Tensor) -> TokensWithImages:
        """The forest's tokens with the features of the used images."""
        return TokensWithImages(features_SMC=features_SMC, feature_N=self.feature_N, position_AN=self.position_AN)


def number_columns(columns: Sequence[np.ndarray]) -> np.ndarray:
    """int64 [F], equal exactly where all columns, integers [F] from -1 on, are equal."""
    key_F = columns[0]
    for column in columns[1:]:
        key_F = np.unique(key_F, return_inverse=True)[1].reshape(-1) * (column.max(initial=0) + 2) + column + 1
    return key_F


class _Distinct:
    """Images by content."""

    def __init__(self) -> None:
        self.pixels: list[torch.Tensor] = []
        self.grids: list[np.ndarray] = []
        self._numbers: dict[tuple[bytes, torch.dtype, bytes], list[int]] = {}

    def number(self, pixels: torch.Tensor, grids: np.ndarray, label: str) -> list[int]:
        """Numbers of a row's images."""
        patches = grids.prod(axis=1)
        if patches.sum() != len(pixels):
            raise RowError(f"{label}: has {len(pixels)} patches of images, but its grids need {patches.sum()}")
        return [self._number(*one) for one in zip(pixels.split(patches.tolist()), grids, strict=True)]

    def _number(self, pixels: torch.Tensor, grid: np.ndarray) -> int:
        values = pixels.reshape(-1)
        sample = values[:: max(1, len(values) // SAMPLED)].double().numpy().tobytes()
        alike = self._numbers.setdefault((grid.tobytes(), pixels.dtype, sample), [])
        # Compared in full: a hash of all patches takes longer, and could be wrong.
        found = next((number for number in alike if torch.equal(self.pixels[number], pixels)), None)
        if found is None:
            found = len(self.pixels)
            alike.append(found)
            self.pixels.append(pixels)
            self.grids.append(grid)
        return found


def _of_tokens(
    is_image: np.ndarray, found: Sequence[int], sizes: np.ndarray, label: str
) -> tuple[np.ndarray, np.ndarray]:
    """The image of each token of a row, and the token's index in it."""
    tokens = np.flatnonzero(is_image)
    if len(tokens) != sizes.sum():
        raise RowError(
            f"{label}: has {len(tokens)} image tokens, but its {len(sizes)} images need {sizes.sum()}; a row cannot "
            "end or branch inside an image"
        )
    image, place = np.full(len(is_image), -1, dtype=np.int64), np.zeros(len(is_image), dtype=np.int64)
    for number, own in zip(found, np.split(tokens, np.cumsum(sizes))[:-1], strict=True):
        if own[-1] - own[0] != len(own) - 1:
            raise RowError(f"{label}: other tokens interrupt those of an image at token {own[0]}")
        image[own], place[own] = number, np.arange(len(own))
    return image, place
