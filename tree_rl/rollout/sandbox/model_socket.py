"""The trainer's end of a sandbox's connection to the model: a Unix socket that leads to the gateway alone."""

import asyncio
import contextlib
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

SOCKET = "socket"


@asynccontextmanager
async def socket_to(host: str, port: int, folder: Path) -> AsyncIterator[None]:
    """Serve `folder/socket` while the context lasts; the folder is a sandbox's `model`."""
    carrying: set[asyncio.Task[None]] = set()

    async def connect(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.current_task()
        assert task is not None
        carrying.add(task)
        try:
            # If either side closes, both connections end.
            with contextlib.suppress(OSError, asyncio.CancelledError):
                far_reader, far_writer = await asyncio.open_connection(host, port)
                try:
                    await asyncio.gather(_carry(reader, far_writer), _carry(far_reader, writer))
                finally:
                    far_writer.close()
        finally:
            writer.close()
            carrying.discard(task)

    path = folder / SOCKET
    server = await asyncio.start_unix_server(connect, path)
    path.chmod(0o666)
    try:
        yield
    finally:
        server.close()
        for task in tuple(carrying):
            task.cancel()
        await asyncio.gather(*carrying)
        path.unlink(missing_ok=True)


async def _carry(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    while data := await reader.read(1 << 16):
        writer.write(data)
        await writer.drain()
    if writer.can_write_eof():
        writer.write_eof()
