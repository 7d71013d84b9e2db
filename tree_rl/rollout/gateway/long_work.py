"""Work that would keep the event loop from other sessions goes to a thread."""

import asyncio
from collections.abc import Callable
from typing import TypeVar

T = TypeVar("T")


async def beside_the_loop(work: Callable[[], T], *, is_long: bool) -> T:
    """Do work here if it is short, in a thread if it is long."""
    return await asyncio.to_thread(work) if is_long else work()
