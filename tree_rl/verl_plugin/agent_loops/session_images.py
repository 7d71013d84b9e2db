"""Images of a worker's sessions: in recorded tokens, each image has a number instead of its tokens' id.

So two calls share only tokens of the same image. Servers and rows get tokens and images apart.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from hashlib import sha256
from io import BytesIO
from itertools import groupby
from typing import Any

from PIL import Image

from tree_rl.rollout.gateway.tokens.images import FIRST_NUMBER
from tree_rl.verl_plugin import compat

FORMATS = ("PNG", "JPEG", "GIF", "WEBP")
"""Those of OpenAI and Anthropic. For others, such as EPS, Pillow may start programs."""
MAX_PIXELS = 1 << 25
"""Largest image, 100 MB in memory. A body of half a megabyte can hold 500 MB."""


@dataclass(frozen=True, kw_only=True, slots=True)
class _Known:
    content: bytes
    image: Any
    size: int


class SessionImages:
    """Numbers images by a hash of their content; `options` are verl's `data.mm_processor_kwargs`."""

    def __init__(self, processor: Any, options: Mapping[str, Any] | None = None) -> None:
        self.options = dict(options or {})
        self._processor = processor
        self._token = compat.get_processor_token_id(processor, "image")
        self._known: dict[int, _Known] = {}

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
        numbers = [self._number(*pair) for pair in zip(images, sizes, strict=True)]
        tokens = [number for number, size in zip(numbers, sizes, strict=True) for _ in range(size)]
        if ids.count(self._token) != len(tokens):
            raise ValueError(
                f"a conversation has {ids.count(self._token)} image tokens, but its {len(sizes)} images need "
                f"{len(tokens)}: does the chat template write a place for each image?"
            )
        rest = iter(tokens)
        return [next(rest) if token == self._token else token for token in ids]

    def read(self, encoded: bytes) -> tuple[int, int]:
        """Number and tokens of an image of one of `FORMATS`. Raises `ValueError` if it is none, or refused."""
        try:
            opened = Image.open(BytesIO(encoded), formats=FORMATS)
            if opened.width * opened.height > MAX_PIXELS:
                raise ValueError(f"{opened.width} x {opened.height}, more than {MAX_PIXELS} pixels")
            image = opened.convert("RGB")
        except (OSError, SyntaxError, Image.DecompressionBombError) as error:
            raise ValueError(str(error)) from error
        tokens = self.encode(self._processor.image_token, [image])
        return tokens[0], len(tokens)

    def split(self, numbered: Sequence[int]) -> tuple[list[int], list[Any]]:
        """Token ids as the model knows them, and the images in order."""
        images: list[Any] = []
        for number, run in groupby(numbered):
            if number >= FIRST_NUMBER:
                known = self._known[number]
                images += [known.image] * (len(list(run)) // known.size)
        return [self._token if token >= FIRST_NUMBER else token for token in numbered], images

    def _number(self, image: Any, size: int) -> int:
        content = sha256(f"{image.mode} {image.size} ".encode() + image.tobytes()).digest()
        number = FIRST_NUMBER + int.from_bytes(content[:4], "big") % (FIRST_NUMBER - 1)
        while number in self._known and self._known[number].content != content:
            number += 1
        self._known.setdefault(number, _Known(content=content, image=image, size=size))
        return number
