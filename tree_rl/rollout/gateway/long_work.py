"""Moves work that would block the event loop to a thread. One rule decides which work that is."""

import asyncio
from collections.abc import Callable
from typing import TypeVar

T = TypeVar("T")
LONG = 64_000
"""Cost from which work goes to a thread. Reading so many characters takes about 5 ms, 10 ms if most messages are
empty."""
READ, TOKENIZE, SEARCH = 1, 8, 64
"""Cost per character of reading, rendering or writing; of tokenizing or decoding; and of decoding repeatedly, as in a
bisection or when each token is decoded alone."""
CHARACTERS_PER_TOKEN = 4


async def off_the_loop(work: Callable[[], T], cost: int, *, characters: int = 0, tokens: int = 0) -> T:
    """Do short work directly, and long work in a thread. `cost`, a character's, is `READ`, `TOKENIZE` or `SEARCH`."""
    is_long = cost * (characters + CHARACTERS_PER_TOKEN * tokens) >= LONG
    return await asyncio.to_thread(work) if is_long else work()
