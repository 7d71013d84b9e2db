"""Images of a worker's sessions: in recorded tokens, each image has a number instead of its tokens' id.

So two calls share only tokens of the same image. Servers and rows get tokens and images apart.
"""

from collections.abc import Mapping, Sequence
from hashlib import sha256
from itertools import groupby
from typing import Any

from tree_rl.verl_plugin import compat

FIRST_NUMBER = 1 << 30
"""Smallest number of an image; ids of tokens are smaller."""


class SessionImages:
    """Numbers images by content.

    Args:
        processor: the model's processor.
        options: verl's `data.mm_processor_kwargs`.
    """

    def __init__(self, processor: Any, options: Mapping[str, Any] | None = None) -> None:
        self._processor = processor
        self.options = dict(options or {})
        self._token = compat.get_processor_token_id(processor, "image")
        self._images: list[Any] = []
        self._sizes: list[int] = []
        self._numbers: dict[bytes, int] = {}

    def encode(self, text: str, images: Sequence[Any]) -> list[int]:
        """Token ids of a rendered conversation, and numbers instead of those of its images (PIL), which are in order.

        Raises:
            ValueError: the text has not as many places for images as there are images.
        """
        if not images:
            return list(self._processor.tokenizer(text, add_special_tokens=False)["input_ids"])
        found = compat.build_multimodal_processor_inputs(
            self._processor, text=[text], images=list(images), mm_processor_kwargs=self.options
        )
        ids = found["input_ids"][0].tolist()
        sizes = (found["image_grid_thw"].prod(dim=1) // self._processor.image_processor.merge_size**2).tolist()
        numbers = [number for pair in zip(images, sizes, strict=True) for number in self._tokens(*pair)]
        if ids.count(self._token) != len(numbers):
            raise ValueError(
                f"a conversation has {ids.count(self._token)} image tokens, but its {len(sizes)} images need "
                f"{len(numbers)}: does the chat template write a place for each image?"
            )
        rest = iter(numbers)
        return [next(rest) if token == self._token else token for token in ids]

    def split(self, numbered: Sequence[int]) -> tuple[list[int], list[Any]]:
        """Token ids as the model knows them, and the images in order."""
        images: list[Any] = []
        for number, run in groupby(numbered):
            if number >= FIRST_NUMBER:
                place = number - FIRST_NUMBER
                images += [self._images[place]] * (len(list(run)) // self._sizes[place])
        return [self._token if token >= FIRST_NUMBER else token for token in numbered], images

    def _tokens(self, image: Any, size: int) -> list[int]:
        content = sha256(f"{image.mode} {image.size} ".encode() + image.tobytes()).digest()
        place = self._numbers.setdefault(content, len(self._images))
        if place == len(self._images):
            self._images.append(image)
            self._sizes.append(size)
        return [FIRST_NUMBER + place] * size
