"""Images in conversations: a request's marks become places in the text, and places become numbers among the tokens.

A place is what the chat templates of Qwen's models write for an image, with the image's number and tokens in it. So
texts and tokens are equal only where the images are.
"""

import base64
import binascii
import re
import secrets
from collections.abc import Callable, Sequence
from dataclasses import replace
from hashlib import sha256
from itertools import groupby
from typing import Any, Protocol

from tree_rl.rollout.gateway.protocols.exchange import ChatRequest
from tree_rl.rollout.gateway.protocols.fields import RequestError
from tree_rl.rollout.gateway.protocols.messages import IMAGE_MARK, ChatMessage, SentImage

FIRST_NUMBER = 1 << 30
"""Smallest number of an image, which replaces the id of each of its tokens; ids of tokens are smaller."""
START, END = "<|vision_start|>", "<|vision_end|>"
IMAGE, VIDEO = "<|image_pad|>", "<|video_pad|>"
DATA_URL = re.compile(r"data:image/[\w.+-]+;base64,(.*)", re.DOTALL)


class ImageReader(Protocol):
    """The images of a gateway's sessions."""

    def read(self, encoded: bytes) -> tuple[int, int]:
        """Number and tokens of an image (PNG, JPEG, ...). Raises `ValueError` if the model's processor refuses it."""

    def split(self, numbered: Sequence[int]) -> tuple[list[int], list[Any]]:
        """Token ids as the model knows them, and the images in order."""


class ImagePlaces:
    """Images of a gateway whose model reads them."""

    def __init__(self, reader: ImageReader) -> None:
        self._reader = reader
        self._sizes: dict[int, int] = {}
        self._number_of_url: dict[bytes, int] = {}
        self._nonce = secrets.token_hex(4)
        self._written = re.compile(rf"{re.escape(IMAGE)}(\d+)x(\d+):{self._nonce}")

    def place(self, request: ChatRequest) -> ChatRequest:
        """A request with places instead of marks. Raises `RequestError` for what is no image in a `data:` URL."""
        places = {mark: self._place(image) for mark, image in request.images.items()}
        # Each part of a message is on a separate line, but templates write nothing between texts and images.
        marked = re.compile(rf"\n?({IMAGE_MARK.pattern})\n?")
        messages = [
            replace(message, content=marked.sub(lambda found: places.get(found[1], found[0]), message.content))
            for message in request.messages
        ]
        return replace(request, messages=tuple(messages))

    def encode(self, piece: str) -> tuple[int, ...] | None:
        """The tokens of a piece of text that is an image; None for other text.

        Raises `RequestError` for a token of images or videos that the gateway did not write.
        """
        if not piece.startswith((IMAGE, VIDEO)):
            return None
        found = self._written.fullmatch(piece)
        if found is None:
            raise RequestError(
                f"expected text without {IMAGE} and {VIDEO}; send images as parts of type image_url", field="messages"
            )
        return (int(found[1]),) * int(found[2])

    def decode(self, token_ids: Sequence[int], decode: Callable[[list[int]], str]) -> str:
        """Text of tokens, some of which are numbers of images."""
        texts = []
        for number, run in groupby(token_ids, key=lambda token: token if token >= FIRST_NUMBER else 0):
            own = list(run)
            count = -(-len(own) // self._sizes[number]) if number else 0
            texts.append(self._text(number) * count if number else decode(own))
        return "".join(texts)

    def _place(self, image: SentImage) -> str:
        # An agent sends an image again with every later call.
        digest = sha256(image.url.encode("utf-8", "surrogatepass")).digest()
        if digest not in self._number_of_url:
            number, size = self._read(image)
            self._sizes[number] = size
            self._number_of_url[digest] = number
        return f"{START}{self._text(self._number_of_url[digest])}{END}"

    def _read(self, image: SentImage) -> tuple[int, int]:
        found = DATA_URL.fullmatch(image.url)
        if found is None:
            raise RequestError(
                f"expected a data: URL of an image in base64, received {image.url[:60]!r}; the gateway fetches nothing",
                field=image.field,
            )
        try:
            return self._reader.read(base64.b64decode(found[1], validate=True))
        except (binascii.Error, ValueError) as error:
            raise RequestError(f"expected an image, received other data ({error})", field=image.field) from error

    def _text(self, number: int) -> str:
        return f"{IMAGE}{number}x{self._sizes[number]}:{self._nonce}"


def without_images(request: ChatRequest) -> ChatRequest:
    """A request to a model of text: lines of text instead of images."""

    def line(message: ChatMessage) -> str:
        return IMAGE_MARK.sub(
            lambda found: request.images[found[0]].line if found[0] in request.images else found[0], message.content
        )

    messages = tuple(replace(message, content=line(message)) for message in request.messages)
    return replace(request, messages=messages, left_out=tuple(dict.fromkeys((*request.left_out, "image"))))
