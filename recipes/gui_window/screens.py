"""The task: a screen with four buttons, one of them lit. The agent names its button, and the next one lights up."""

import random
from collections.abc import Sequence
from typing import Any

from PIL import Image, ImageDraw

BUTTON = 8
"""Height and width of a button in pixels: one image token."""
LETTERS = "abcd"
"""The buttons' names, row after row."""
ASKED = "click lit"
GREY = (70, 70, 70)
LIT = ((255, 40, 40), (40, 220, 60), (60, 90, 255), (240, 210, 40))
"""What the buttons look like when lit. A tiny model reads colours sooner than places."""


class Screens:
    """One session. Which buttons light up depends on the seed alone, so sessions of a task see the same screens."""

    def __init__(self, seed: int, clicks: int) -> None:
        self._targets = random.Random(seed).choices(range(len(LETTERS)), k=clicks)
        self._correct = 0
        self._made = 0

    @property
    def is_over(self) -> bool:
        """True after the last click."""
        return self._made == len(self._targets)

    @property
    def target(self) -> str:
        """Name of the lit button."""
        return LETTERS[self._targets[self._made]]

    def screenshot(self) -> Image.Image:
        """Draw the screen."""
        picture = Image.new("RGB", (2 * BUTTON, 2 * BUTTON), GREY)
        row, column = divmod(self._targets[self._made], 2)
        corner, lit = (column * BUTTON, row * BUTTON), LIT[self._targets[self._made]]
        ImageDraw.Draw(picture).rectangle((*corner, corner[0] + BUTTON - 1, corner[1] + BUTTON - 1), fill=lit)
        return picture

    def click(self, name: str) -> None:
        """Press a button; anything else presses nothing."""
        self._correct += name == self.target
        self._made += 1

    @property
    def score(self) -> float:
        """Share of the clicks that met the lit button."""
        return self._correct / len(self._targets)


def conversation(said: Sequence[str | None]) -> list[dict[str, Any]]:
    """The conversation of some screens, each with what the agent said; None: nothing yet."""
    messages: list[dict[str, Any]] = [{"role": "system", "content": ASKED}]
    for answer in said:
        messages.append({"role": "user", "content": [{"type": "image"}]})
        messages += [] if answer is None else [{"role": "assistant", "content": answer}]
    return messages
