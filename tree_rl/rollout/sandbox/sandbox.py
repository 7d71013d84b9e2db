"""Where the commands of an agent run: a confined directory here, or a machine that SWE-ReX reaches.

`confined` needs no Docker and is the default. The other back ends are SWE-ReX deployments: `local` (this machine,
unconfined), `docker`, `modal` and `remote`.
"""

import asyncio
import shutil
from collections.abc import Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any, Literal, Protocol

from tree_rl.rollout.sandbox.confinement import HIDING, Limits, strictest_means
from tree_rl.rollout.sandbox.jail import DOOR, LOOPBACK
from tree_rl.rollout.sandbox.model_socket import SOCKET, socket_to
from tree_rl.rollout.sandbox.workspace import CommandResult, Workspace

Backend = Literal["confined", "local", "docker", "modal", "remote"]
BACKENDS: tuple[Backend, ...] = ("confined", "local", "docker", "modal", "remote")
WITH_IMAGE: tuple[Backend, ...] = ("docker", "modal")
KEY = "sandbox"
AGENT_PROGRAMS = Path(__file__).parent
DOOR_PROGRAM = "model_door.py"


class SandboxError(RuntimeError):
    """A sandbox cannot start; the message names the config key to change."""


class SandboxDied(RuntimeError):  # noqa: N818
    """A sandbox stopped answering. The session ends; the agent is not at fault."""


@dataclass(frozen=True, kw_only=True, slots=True)
class SandboxOptions:
    """Which sandbox, and what its commands may use.

    Raises:
        ValueError: an unknown back end, or one that leaves commands unconfined without being allowed to; names the key.
    """

    backend: Backend = "confined"
    limits: Limits = field(
        default_factory=lambda: Limits(
            timeout_seconds=30, cpu_seconds=30, output_bytes=65_536, memory_bytes=2 << 30, processes=64
        )
    )
    """Of each command. `docker`, `modal` and `remote` have the network of their container."""
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
    """Whether programs of `run_agent` reach the gateway through a door of the sandbox."""

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

    async def close(self) -> None:
        """Throw it away; idempotent, also after a failed start."""


class ConfinedSandbox:
    """A `Workspace`: commands see their directory and the system's programs."""

    has_door = True

    def __init__(self, limits: Limits, readable: Sequence[str] = ()) -> None:
        self._limits = limits
        self._readable = [Path(path) for path in readable]
        self._workspace: Workspace | None = None

    async def start(self) -> None:
        """Make the directory."""
        self._workspace = Workspace(limits=self._limits, readable=self._readable)

    async def run(self, command: str) -> CommandResult:
        """Execute a command."""
        workspace = self._alive()
        try:
            return await workspace.run_async(command)
        except OSError as error:
            raise SandboxDied(f"the workspace failed: {error}") from error

    async def write(self, files: Mapping[str, str]) -> None:
        """Write files."""
        workspace = self._alive()
        try:
            for name, content in files.items():
                workspace.write(name, content)
        except OSError as error:
            raise SandboxDied(f"the workspace failed: {error}") from error

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
        for name in (DOOR_PROGRAM, LOOPBACK):
            shutil.copy(AGENT_PROGRAMS / name, workspace.door / name)
        program = ["python3", "-I", "-B", f"{DOOR}/{DOOR_PROGRAM}", f"{DOOR}/{SOCKET}", str(port), command]
        # A thread of its own: an agent works for minutes, and short commands need their few threads.
        threads = ThreadPoolExecutor(max_workers=1, thread_name_prefix="agent")
        run = partial(workspace.run, quote(program), environment=variables, limits=limits)
        try:
            async with socket_to(*gateway, workspace.door):
                return await asyncio.get_running_loop().run_in_executor(threads, run)
        except OSError as error:
            raise SandboxDied(f"the workspace failed: {error}") from error
        finally:
            threads.shutdown(wait=False)

    async def close(self) -> None:
        """Remove the directory."""
        if self._workspace is not None:
            self._workspace.close()

    def _alive(self) -> Workspace:
        if self._workspace is None or not self._workspace.directory.is_dir():
            raise SandboxDied("the workspace is gone")
        return self._workspace


def quote(arguments: Iterable[str]) -> str:
    """Arguments of a shell command, quoted."""
    return " ".join("'" + argument.replace("'", "'\\''") + "'" for argument in arguments)
