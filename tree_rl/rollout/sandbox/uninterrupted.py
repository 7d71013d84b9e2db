"""Clean-up that a cancellation does not interrupt."""

import asyncio
import logging
from collections.abc import Coroutine
from typing import Any, TypeVar

Done = TypeVar("Done")
logger = logging.getLogger(__name__)


async def uninterrupted(work: Coroutine[Any, Any, Done]) -> Done:
    """Await work to its end even if the caller is cancelled; then raise the cancellation."""
    task = asyncio.create_task(work)
    cancelled: asyncio.CancelledError | None = None
    while not task.done():
        try:
            await asyncio.wait({task})
        except asyncio.CancelledError as error:
            cancelled = error
    if cancelled is None:
        return task.result()
    if not task.cancelled() and (failed := task.exception()) is not None:
        logger.error("what a cancelled session leaves could not be ended", exc_info=failed)
    raise cancelled
