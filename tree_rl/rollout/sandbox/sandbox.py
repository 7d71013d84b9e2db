"""The interface of a sandbox, in which the commands of one session run.

`local`, the default, is a folder of this machine inside bubblewrap. `docker`, `modal` and `remote` are containers that
SWE-ReX reaches.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any, Literal, Protocol

from tree_rl.option_types import check_type
from tree_rl.rollout.sandbox.errors import SandboxDied as SandboxDied
from tree_rl.rollout.sandbox.errors import SandboxError as SandboxError
from tree_rl.rollout.sandbox.processes.limits import Limits
from tree_rl.rollout.sandbox.sandbox_folder import CommandResult, why_no_bubblewrap

Backend = Literal["local", "docker", "modal", "remote"]
WITH_IMAGE: tuple[Backend, ...] = ("docker", "modal")
KEY = "agent_options.sandbox"
JUDGE_OUTPUT_BYTES = 8 << 20
"""Least output kept of commands that judge: a long report ends with its verdicts."""


@dataclass(frozen=True, kw_only=True, slots=True)
class SandboxOptions:
    """Which sandbox, and what its commands may use.

    Raises:
        ValueError: an unknown back end, or bubblewrap does not work and `unconfined` is not set; names the key.
    """

    backend: Backend = "local"
    """Where commands run: in a folder of this machine inside bubblewrap, or in a container that SWE-ReX reaches."""
    limits: Limits = field(default_factory=Limits)
    """Limits of each command. `docker`, `modal` and `remote` have the network of their container."""
    readable: tuple[str, ...] = ()
    """Paths of this machine that `local` commands see besides the system's programs, read-only: an agent's
    installation, for example."""
    arguments: Mapping[str, Any] = field(default_factory=dict)
    """Arguments of SWE-ReX's config of the back end: `docker_args`, `container_runtime`, `modal_sandbox_kwargs`,
    `host`, `port`, `auth_token`, ... `startup_timeout` (180 s) works for every back end."""
    unconfined: bool = False
    """True turns all protection off: `local` commands run without bubblewrap, with this machine's files and network;
    `remote` judges a session on the server where its agent ran."""

    def __post_init__(self) -> None:
        check_type(f"{KEY}.backend", self.backend, Backend)
        if self.backend == "local" and not self.unconfined and (reason := why_no_bubblewrap()):
            raise ValueError(
                f"{KEY}.backend=local needs bubblewrap 0.8 or newer, which does not work here ({reason}); install it "
                f"(Debian: apt install bubblewrap), allow user namespaces, choose a back end with an image, or set "
                f"{KEY}.unconfined=true, which protects nothing"
            )


def for_judge(options: SandboxOptions) -> SandboxOptions:
    """The options of the sandbox where a session of these options is judged."""
    output_bytes = max(options.limits.output_bytes, JUDGE_OUTPUT_BYTES)
    return replace(options, limits=replace(options.limits, output_bytes=output_bytes))


class Sandbox(Protocol):
    """The sandbox of one session. Methods raise `SandboxDied` when it does not answer."""

    has_model_port: bool
    """True if programs of `run_agent` reach the gateway at a port of the sandbox, and nothing else."""

    async def start(self) -> None:
        """Start the sandbox. Raises `SandboxError` if that fails."""

    async def run(self, command: str) -> CommandResult:
        """Execute a POSIX shell command in the working directory."""

    async def write(self, files: Mapping[str, str]) -> None:
        """Write text files, paths relative to the working directory.

        Raises `ValueError` if a path leads outside, also through a link that the agent made.
        """

    async def run_agent(
        self, command: str, *, variables: Mapping[str, str], gateway: tuple[str, int], port: int, limits: Limits
    ) -> CommandResult:
        """Execute a program that calls the model.

        Args:
            gateway: host and port at which this process reaches the gateway.
            port: port on 127.0.0.1 at which the program reaches it, if `has_model_port`.
        """

    async def stop(self) -> None:
        """Kill every process of the session; return when all are dead and every call of `run` has returned.

        Later calls of `run`, `run_agent` and `write` raise `SandboxDied`. Idempotent, and safe before `start`.
        """

    def fresh(self) -> "Sandbox":
        """An unstarted sandbox with the options `for_judge`: another folder and another user, or another container.

        Raises `SandboxError` where the session's remains could affect it.
        """

    async def copy_to(self, judge: "Sandbox", *, leave_out: Callable[[str], bool]) -> None:
        """Copy the agent's files into another started sandbox, after `stop`.

        Copies regular files, and links that stay inside, except relative paths for which `leave_out` is true. Raises
        `ValueError` if they are too many, too deep or too large.
        """

    async def close(self) -> None:
        """Stop and delete the sandbox; idempotent, also after a failed start. A cancellation waits for it."""
