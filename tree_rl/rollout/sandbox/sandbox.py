"""Where the commands of an agent run: a confined directory here, or a machine that SWE-ReX reaches.

`confined` needs no Docker and is the default. The other back ends are SWE-ReX deployments: `local` (this machine,
unconfined), `docker`, `modal` and `remote`.
"""

import asyncio
import os
import shutil
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any, Literal, Protocol, TypeVar

from tree_rl.rollout.sandbox.confinement import HIDING, Limits, strictest_means
from tree_rl.rollout.sandbox.door.model_socket import SOCKET, socket_to
from tree_rl.rollout.sandbox.errors import SandboxDied as SandboxDied
from tree_rl.rollout.sandbox.errors import SandboxError as SandboxError
from tree_rl.rollout.sandbox.jail import DOOR, LOOPBACK
from tree_rl.rollout.sandbox.to_the_end import to_the_end
from tree_rl.rollout.sandbox.workspace import CommandResult, Workspace, command_threads

Done = TypeVar("Done")
Backend = Literal["confined", "local", "docker", "modal", "remote"]
BACKENDS: tuple[Backend, ...] = ("confined", "local", "docker", "modal", "remote")
WITH_IMAGE: tuple[Backend, ...] = ("docker", "modal")
KEY = "sandbox"
AGENT_PROGRAMS = Path(__file__).with_name("door")
DOOR_PROGRAM = "model_door.py"


@dataclass(frozen=True, kw_only=True, slots=True)
class SandboxOptions:
    """Which sandbox, and what its commands may use.

    Raises:
        ValueError: an unknown back end, or one that leaves commands unconfined without being allowed to; names the key.
    """

    backend: Backend = "confined"
    """Where commands run: a confined folder of this machine, a container by SWE-ReX, or this machine as it is."""
    limits: Limits = field(
        default_factory=lambda: Limits(
            timeout_seconds=30, cpu_seconds=30, output_bytes=65_536, memory_bytes=2 << 30, processes=64
        )
    )
    """Limits of each command. `docker`, `modal` and `remote` have the network of their container."""
    readable: tuple[str, ...] = ()
    """Paths of this machine that `confined` commands see besides the system's programs, read-only: an agent's own
    installation, for example."""
    arguments: Mapping[str, Any] = field(default_factory=dict)
    """Given to SWE-ReX's config of the back end: `docker_args`, `container_runtime`, `modal_sandbox_kwargs`, `host`,
    `port`, `auth_token`, ... `startup_timeout` (180 s) works for every back end."""
    allow_unconfined: bool = False
    """Lets commands run that can read what the trainer's user can read: the back end `local`, or `confined` on a
    machine where neither bubblewrap nor mount namespaces work."""

    def __post_init__(self) -> None:
        if self.backend not in BACKENDS:
            raise ValueError(f"{KEY}.backend={self.backend!r}: expected one of {', '.join(BACKENDS)}")
        if self.backend == "local" and not self.allow_unconfined:
            raise ValueError(
                f"{KEY}.backend=local runs the model's commands as the trainer's user, with its files and network; use "
                f"{KEY}.backend=confined, or set {KEY}.allow_unconfined=true"
            )
        if self.backend == "confined" and not self.allow_unconfined and strictest_means() not in HIDING:
            raise ValueError(
                f"{KEY}.backend=confined: this machine allows neither bubblewrap nor mount namespaces, so commands "
                f"could read the trainer's files; install bubblewrap, or set {KEY}.allow_unconfined=true"
            )


class Sandbox(Protocol):
    """A place for one session. Every method that uses it raises `SandboxDied` when it does not answer."""

    has_door: bool
    """True if programs of `run_agent` reach the gateway through a door of the sandbox."""

    async def start(self) -> None:
        """Bring it up. Raises `SandboxError` if it does not start."""

    async def run(self, command: str) -> CommandResult:
        """Execute a POSIX shell command in the working directory."""

    async def write(self, files: Mapping[str, str]) -> None:
        """Write text files, paths relative to the working directory.

        Raises `ValueError` if a path leads outside, also through a link that the agent made.
        """

    async def run_agent(
        self, command: str, *, variables: Mapping[str, str], gateway: tuple[str, int], port: int, limits: Limits
    ) -> CommandResult:
        """Execute a program that asks the model.

        Args:
            gateway: host and port of the gateway, as this process sees them.
            port: where the program finds it on 127.0.0.1, if the sandbox has a door.

        Raises:
            SandboxError: it cannot let the program reach the gateway alone.
        """

    async def stop(self) -> None:
        """Kill every process of the session; return when all are dead and every call of `run` has returned.

        Later calls of `run`, `run_agent` and `write` raise `SandboxDied`. Idempotent, and safe before `start`.
        """

    def fresh(self) -> "Sandbox":
        """An unstarted sandbox with the same options: another directory and another user, or another container.

        Raises `SandboxError` where what the session left could reach it.
        """

    async def copy_to(self, judge: "Sandbox", *, leave_out: Callable[[str], bool]) -> None:
        """Copy the agent's files into another started sandbox, after `stop`.

        Regular files, and links that stay inside; relative paths for which `leave_out` is true stay behind. Raises
        `ValueError` if they cannot be copied: too many, too deep, too large.
        """

    async def close(self) -> None:
        """Throw it away; idempotent, also after a failed start. A cancellation of the caller waits until it is done."""


class ConfinedSandbox:
    """A `Workspace`: commands see their directory and the system's programs.

    Args:
        allow_unconfined: a separate judge may lie where left-over processes could reach it.
    """

    has_door = True

    def __init__(self, limits: Limits, readable: Sequence[str] = (), *, allow_unconfined: bool = False) -> None:
        self._limits = limits
        self._readable = [Path(path) for path in readable]
        self._allow_unconfined = allow_unconfined
        self._workspace: Workspace | None = None
        self._stopped = False
        self._calls: set[Future[Any]] = set()

    async def start(self) -> None:
        """Make the directory."""

        def make() -> None:
            # Here, so that `close` finds it although the caller was cancelled.
            self._workspace = Workspace(limits=self._limits, readable=self._readable)

        try:
            await self._in_thread(make)
        except SandboxDied as error:
            raise SandboxError(f"{KEY}.backend=confined did not start: {error}") from error

    async def run(self, command: str) -> CommandResult:
        """Execute a command."""
        return await self._in_thread(partial(self._alive().run, command), command_threads())

    async def write(self, files: Mapping[str, str]) -> None:
        """Write files."""
        workspace = self._alive()

        def write() -> None:
            for name, content in files.items():
                workspace.write(name, content)

        await self._in_thread(write)

    async def run_agent(
        self, command: str, *, variables: Mapping[str, str], gateway: tuple[str, int], port: int, limits: Limits
    ) -> CommandResult:
        """Execute a program whose only network is the gateway."""
        workspace = self._alive()
        if workspace.means not in HIDING:
            raise SandboxError(
                f"{KEY}.backend=confined: a command-line agent needs bubblewrap or mount namespaces, this machine "
                f"allows {workspace.means}"
            )

        def lay_out() -> None:
            for name in (DOOR_PROGRAM, LOOPBACK):
                shutil.copy(AGENT_PROGRAMS / name, workspace.door / name)

        await self._in_thread(lay_out)
        program = ["python3", "-I", "-B", f"{DOOR}/{DOOR_PROGRAM}", f"{DOOR}/{SOCKET}", str(port), command]
        async with socket_to(*gateway, workspace.door):
            return await self._in_thread(partial(workspace.run, quote(program), environment=variables, limits=limits))

    async def stop(self) -> None:
        """Kill what runs, and wait for every thread that served the session."""
        self._stopped = True
        await self._stop_workspace()
        # A call that was cancelled has a thread all the same.
        await asyncio.gather(*map(asyncio.wrap_future, tuple(self._calls)), return_exceptions=True)
        await self._stop_workspace()

    async def _stop_workspace(self) -> None:
        if self._workspace is not None:
            await self._in_thread(self._workspace.stop, counts=False)

    def fresh(self) -> "ConfinedSandbox":
        """Another directory of another user."""
        if strictest_means() == "limits" and os.geteuid() != 0 and not self._allow_unconfined:
            raise SandboxError(
                f"{KEY}.backend=confined: no separate place for a judge, as this process is not root and this machine "
                f"allows no namespaces; install bubblewrap, or set {KEY}.allow_unconfined=true"
            )
        readable = [str(path) for path in self._readable]
        return ConfinedSandbox(self._limits, readable, allow_unconfined=self._allow_unconfined)

    async def copy_to(self, judge: Sandbox, *, leave_out: Callable[[str], bool]) -> None:
        """Copy the agent's files into another confined sandbox."""
        if not isinstance(judge, ConfinedSandbox) or judge._workspace is None or self._workspace is None:
            raise TypeError(f"copy_to: expected a started ConfinedSandbox, received {type(judge).__name__}")
        await self._in_thread(partial(self._workspace.copy_to, judge._workspace, leave_out=leave_out), counts=False)

    async def close(self) -> None:
        """Stop, and remove the directory."""
        await to_the_end(self._close())

    async def _close(self) -> None:
        await self.stop()
        if self._workspace is not None:
            await self._in_thread(self._workspace.close, counts=False)

    async def _in_thread(
        self, act: Callable[[], Done], threads: ThreadPoolExecutor | None = None, *, counts: bool = True
    ) -> Done:
        """Call something that blocks.

        Args:
            threads: None takes a thread of its own: an agent works for minutes, and commands need their few threads.
            counts: whether `stop` waits for it.
        """
        own = threads or ThreadPoolExecutor(max_workers=1, thread_name_prefix="sandbox")
        try:
            call = own.submit(act)
            if counts:
                self._calls.add(call)
                call.add_done_callback(self._calls.discard)
            return await asyncio.wrap_future(call)
        except OSError as error:
            raise SandboxDied(f"the workspace failed: {error}") from error
        finally:
            if threads is None:
                own.shutdown(wait=False)

    def _alive(self) -> Workspace:
        if self._stopped:
            raise SandboxDied("the sandbox was stopped")
        if self._workspace is None or not self._workspace.directory.is_dir():
            raise SandboxDied("the workspace is gone")
        return self._workspace


def quote(arguments: Iterable[str]) -> str:
    """Arguments of a shell command, quoted."""
    return " ".join("'" + argument.replace("'", "'\\''") + "'" for argument in arguments)
