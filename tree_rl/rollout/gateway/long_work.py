"""Work that would keep the event loop from other sessions goes to a thread. One rule says which work that is."""

import asyncio
from collections.abc import Callable
from typing import TypeVar

T = TypeVar("T")
LONG = 64_000
"""Characters that may be read here: some 5 ms. So large a body of two thousand empty messages takes 10 ms."""
READ, SPELL, SEARCH = 1, 8, 64
"""What a character costs that is read, rendered or written; that is tokenized or decoded; and that is decoded over and
over, as where a search looks for a text's last token, or each token is decoded alone."""
CHARACTERS_PER_TOKEN = 4


async def beside_the_loop(work: Callable[[], T], cost: int, *, characters: int = 0, tokens: int = 0) -> T:
    """Do work here if it is short, in a thread if it is long.

    Args:
        work: what to do.
        cost: of a character; one of `READ`, `SPELL`, `SEARCH`.
        characters: that it goes over.
        tokens: that it goes over besides.
    """
    is_long = cost * (characters + CHARACTERS_PER_TOKEN * tokens) >= LONG
    return await asyncio.to_thread(work) if is_long else work()
