"""The trainer's end of a sandbox's connection to the model: a Unix socket that leads to the gateway alone."""

import asyncio
import contextlib
import os
import socket
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

from tree_rl.rollout.sandbox.errors import SandboxError

SOCKET = "socket"


@asynccontextmanager
async def socket_to(host: str, port: int, folder: Path) -> AsyncIterator[None]:
    """Serve `folder/socket` while the context lasts; the folder is a sandbox's `model`.

    Raises `SandboxError` if the socket cannot be made.
    """
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
    try:
        server = await asyncio.start_unix_server(connect, sock=_bound(folder))
        path.chmod(0o666)
    except OSError as error:
        raise SandboxError(f"the socket to the model, {path}, cannot be made: {error}") from error
    try:
        yield
    finally:
        server.close()
        for task in tuple(carrying):
            task.cancel()
        await asyncio.gather(*carrying)
        path.unlink(missing_ok=True)


def _bound(folder: Path) -> socket.socket:
    """A socket at `folder/socket`. Its address goes by a descriptor, because an address has at most 107 bytes."""
    opened = os.open(folder, os.O_PATH | os.O_DIRECTORY)
    made = socket.socket(socket.AF_UNIX)
    try:
        made.bind(f"/proc/self/fd/{opened}/{SOCKET}")
    except OSError:
        made.close()
        raise
    finally:
        os.close(opened)
    return made


async def _carry(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    while data := await reader.read(1 << 16):
        writer.write(data)
        await writer.drain()
    if writer.can_write_eof():
        writer.write_eof()
