"""A sandbox in a folder of this machine, for an event loop."""

import asyncio
import shlex
import shutil
from collections.abc import Callable, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

from tree_rl.rollout.sandbox import model_port
from tree_rl.rollout.sandbox.errors import SandboxDied, SandboxError
from tree_rl.rollout.sandbox.model_socket import SOCKET, socket_to
from tree_rl.rollout.sandbox.processes.bubblewrap import MODEL_PLACE
from tree_rl.rollout.sandbox.processes.limits import Limits
from tree_rl.rollout.sandbox.sandbox import KEY, Sandbox, SandboxOptions, for_judge
from tree_rl.rollout.sandbox.sandbox_folder import CommandResult, SandboxFolder, command_threads
from tree_rl.rollout.sandbox.uninterrupted import uninterrupted

Done = TypeVar("Done")
PROGRAM = Path(model_port.__file__)


class LocalSandbox:
    """A `SandboxFolder` whose blocking calls run in threads."""

    def __init__(self, options: SandboxOptions) -> None:
        self._options = options
        self.has_model_port = not options.unconfined
        self._folder: SandboxFolder | None = None
        self._stopped = False
        self._calls: set[Future[Any]] = set()

    async def start(self) -> None:
        def make() -> None:
            # Assigned in the thread, so that `close` finds the folder even if the caller was cancelled.
            options = self._options
            readable = [Path(path) for path in options.readable]
            self._folder = SandboxFolder(limits=options.limits, unconfined=options.unconfined, readable=readable)

        try:
            await self._in_thread(make)
        except SandboxDied as error:
            raise SandboxError(f"{KEY}.backend=local did not start: {error}") from error

    async def run(self, command: str) -> CommandResult:
        return await self._in_thread(partial(self._alive().run, command), command_threads())

    async def write(self, files: Mapping[str, str]) -> None:
        folder = self._alive()

        def write() -> None:
            for name, content in files.items():
                folder.write(name, content)

        await self._in_thread(write)

    async def read(self, name: str) -> str | None:
        """Read a text file, also after `stop`; see `SandboxFolder.read`."""
        return await self._in_thread(partial(self._started().read, name), counts=False)

    async def run_agent(
        self, command: str, *, variables: Mapping[str, str], gateway: tuple[str, int], port: int, limits: Limits
    ) -> CommandResult:
        """Execute a program that can connect to the gateway alone, unless it is unconfined."""
        folder = self._alive()
        if self._options.unconfined:
            return await self._in_thread(partial(folder.run, command, environment=variables, limits=limits))
        await self._in_thread(partial(shutil.copy, PROGRAM, folder.model))
        program, socket = f"{MODEL_PLACE}/{PROGRAM.name}", f"{MODEL_PLACE}/{SOCKET}"
        command = shlex.join(["python3", "-I", "-B", program, socket, str(port), command])
        async with socket_to(*gateway, folder.model):
            return await self._in_thread(partial(folder.run, command, environment=variables, limits=limits))

    async def stop(self) -> None:
        """Kill what runs, and wait for every thread that served the session."""
        self._stopped = True
        await self._stop_folder()
        # The thread of a cancelled call still runs.
        await asyncio.gather(*map(asyncio.wrap_future, tuple(self._calls)), return_exceptions=True)
        await self._stop_folder()

    async def _stop_folder(self) -> None:
        if self._folder is not None:
            await self._in_thread(self._folder.stop, counts=False)

    def fresh(self) -> "LocalSandbox":
        return LocalSandbox(for_judge(self._options))

    async def copy_to(self, judge: Sandbox, *, leave_out: Callable[[str], bool]) -> None:
        if not isinstance(judge, LocalSandbox):
            raise TypeError(f"copy_to: expected a LocalSandbox, received {type(judge).__name__}")
        copy = partial(self._started().copy_to, judge._started(), leave_out=leave_out)
        await self._in_thread(copy, counts=False)

    async def save(self, folder: Path) -> bool:
        """Copy all files into an empty folder, while no command runs; False if there is no exact copy.

        Paths of unconfined commands differ between sandboxes, so a copy is not the same state.
        """
        if self._options.unconfined:
            return False
        try:
            await self._in_thread(partial(self._alive().save, folder))
        except ValueError:
            return False
        return True

    async def restore(self, folder: Path) -> None:
        """Start with the files that `save` copied. Raises `ValueError` if that fails."""
        await self.start()
        await self._in_thread(partial(self._alive().restore, folder))

    async def close(self) -> None:
        await uninterrupted(self._close())

    async def _close(self) -> None:
        await self.stop()
        if self._folder is not None:
            await self._in_thread(self._folder.close, counts=False)

    async def _in_thread(
        self, act: Callable[[], Done], threads: ThreadPoolExecutor | None = None, *, counts: bool = True
    ) -> Done:
        """Call something that blocks.

        Args:
            threads: None starts a new thread, because an agent would occupy one of the few command threads for minutes.
            counts: True if `stop` waits for the call.
        """
        own = threads or ThreadPoolExecutor(max_workers=1, thread_name_prefix="sandbox")
        try:
            call = own.submit(act)
            if counts:
                self._calls.add(call)
                call.add_done_callback(self._calls.discard)
            return await asyncio.wrap_future(call)
        except OSError as error:
            raise SandboxDied(f"the sandbox failed: {error}") from error
        finally:
            if threads is None:
                own.shutdown(wait=False)

    def _alive(self) -> SandboxFolder:
        if self._stopped:
            raise SandboxDied("the sandbox was stopped")
        folder = self._started()
        if not folder.directory.is_dir():
            raise SandboxDied("the sandbox is gone")
        return folder

    def _started(self) -> SandboxFolder:
        if self._folder is None:
            raise SandboxDied("the sandbox was not started")
        return self._folder
