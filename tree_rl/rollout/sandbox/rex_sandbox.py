"""A sandbox behind SWE-ReX: the same limits, kept by a small script that runs inside it.

SWE-ReX's server executes one command at a time, so parallel tool calls of one session run one after another there.
"""

import asyncio
import posixpath
import time
from collections.abc import Coroutine, Mapping, Sequence
from typing import Any, TypeVar

import aiohttp
from swerex.deployment.abstract import AbstractDeployment
from swerex.deployment.config import (
    DockerDeploymentConfig,
    LocalDeploymentConfig,
    ModalDeploymentConfig,
    RemoteDeploymentConfig,
)
from swerex.exceptions import SwerexException
from swerex.runtime.abstract import Command, CommandResponse, WriteFileRequest

from tree_rl.rollout.sandbox.confinement import Limits
from tree_rl.rollout.sandbox.ownership import OwnedFolder
from tree_rl.rollout.sandbox.sandbox import KEY, WITH_IMAGE, SandboxDied, SandboxError, SandboxOptions, quote
from tree_rl.rollout.sandbox.workspace import SEARCH_PATH, CommandResult

Answered = TypeVar("Answered")
CONFIGS: Mapping[str, type] = {
    "local": LocalDeploymentConfig,
    "docker": DockerDeploymentConfig,
    "modal": ModalDeploymentConfig,
    "remote": RemoteDeploymentConfig,
}
FAILURES = (SwerexException, aiohttp.ClientError, OSError, TimeoutError)
"""What SWE-ReX raises when a sandbox does not answer."""
STARTUP_SECONDS = 180.0
TIMED_OUT, KILLED = 124, -9
ANSWER_SECONDS = 15.0
"""Time beyond a command's own limit after which its sandbox counts as dead."""
REQUEST_SECONDS = 200.0
"""SWE-ReX's client waits 300 s for an answer: a command that may take longer is started, then asked after."""
POLL_SECONDS = 30.0
STILL_RUNNING = "still running"
SCRIPT = """\
cd "$1" || exit 126
output=$(mktemp) || exit 126
ulimit -c 0; ulimit -f "$4"; ulimit -t "$5"; ulimit -v "$6"
timeout -k 2 "$2" /bin/sh -c "$7" >"$output" 2>&1 </dev/null &
group=$!
wait "$group"
status=$?
kill -s KILL -- "-$group" 2>/dev/null
head -c "$3" "$output"
rm -f "$output"
exit "$status"
"""
"""Directory, seconds, bytes kept, blocks per file, CPU seconds, kilobytes of memory, command. Output goes through a
file, so a background process that holds it open delays nobody, and the file's limit stops one that prints for ever."""

START = """\
folder=$(mktemp -d) || exit 126
run='"$@" >"$0/output"; echo $? >"$0/new"; mv "$0/new" "$0/status"'
setsid /bin/sh -c "$run" "$folder" "$@" >/dev/null 2>&1 </dev/null &
echo "$folder"
"""
"""A command; prints the folder where its output and status will be."""
ASK = """\
tries=$2
while [ ! -e "$1/status" ]; do
  [ "$tries" -gt 0 ] || { echo "$3" >&2; exit 0; }
  tries=$((tries - 1)); sleep 0.2
done
cat "$1/output"; status=$(cat "$1/status"); rm -rf "$1"; exit "$status"
"""
"""Folder, tries, what to print on stderr if the command still runs."""


class RexSandbox:
    """A SWE-ReX deployment.

    Args:
        image: for `docker` and `modal`.
        directory: the working directory; None takes /workspace, for `local` a temporary directory.

    Raises:
        SandboxError: SWE-ReX refuses the arguments.
    """

    has_door = False

    def __init__(self, options: SandboxOptions, *, image: str | None, directory: str | None) -> None:
        self._options = options
        self._is_local = options.backend == "local"
        self._directory = directory or "/workspace"
        self._owned: OwnedFolder | None = None
        given = dict(options.arguments)
        if image is not None and options.backend in WITH_IMAGE:
            given["image"] = image
        self._startup_seconds = float(given.pop("startup_timeout", STARTUP_SECONDS))
        if options.backend in WITH_IMAGE:
            given["startup_timeout"] = self._startup_seconds
        try:
            self.deployment: AbstractDeployment = CONFIGS[options.backend](**given).get_deployment()
        # Back ends raise what they like: Modal asks its service for a token here.
        except Exception as error:
            raise SandboxError(f"{KEY}.backend={options.backend}, {KEY}.arguments={sorted(given)}: {error}") from error

    async def start(self) -> None:
        """Start the deployment and make the working directory."""
        if self._is_local:
            self._owned = OwnedFolder("workspace")
            self._directory = str(self._owned.path)
        try:
            async with asyncio.timeout(self._startup_seconds):
                await self.deployment.start()
                made = await self._execute(Command(command=["mkdir", "-p", self._directory], timeout=ANSWER_SECONDS))
        except Exception as error:
            raise SandboxError(
                f"{KEY}.backend={self._options.backend} did not start: {type(error).__name__}: {error}; is its service "
                f"running and reachable, and {KEY}.arguments right?"
            ) from error
        if made.exit_code != 0:
            raise SandboxError(f"{KEY}: cannot make the directory {self._directory}: {made.stderr[:500]}")

    async def run(self, command: str) -> CommandResult:
        """Execute a command within the limits."""
        return await self._run(command, self._options.limits)

    async def run_agent(
        self, command: str, *, variables: Mapping[str, str], gateway: tuple[str, int], port: int, limits: Limits
    ) -> CommandResult:
        """Execute a program that asks the gateway at its own address, which the container's network must reach."""
        exports = "".join(f"export {name}={quote([value])}\n" for name, value in variables.items())
        return await self._run(exports + command, limits)

    async def _run(self, command: str, limits: Limits) -> CommandResult:
        numbers = (
            limits.timeout_seconds,
            limits.output_bytes + 1,
            limits.file_bytes // 512,
            limits.cpu_seconds,
            limits.memory_bytes // 1024,
        )
        argv = ["/bin/sh", "-c", SCRIPT, "sh", self._directory, *(f"{number}" for number in numbers), command]
        environment = {"PATH": SEARCH_PATH, "HOME": self._directory} if self._is_local else None
        started = time.monotonic()
        if self._is_local or limits.timeout_seconds <= REQUEST_SECONDS:
            whole = Command(command=argv, timeout=limits.timeout_seconds + ANSWER_SECONDS, env=environment)
            response = await self._answer(self._execute(whole))
        else:
            response = await self._run_asking(argv, limits.timeout_seconds + ANSWER_SECONDS)
        seconds = time.monotonic() - started
        output = response.stdout.encode("utf-8", "replace")
        timed_out = response.exit_code in (TIMED_OUT, 128 + 9) and seconds >= limits.timeout_seconds
        return CommandResult(
            output=output[: limits.output_bytes].decode("utf-8", "replace"),
            exit_code=KILLED if timed_out or response.exit_code is None else response.exit_code,
            timed_out=timed_out,
            truncated=len(output) > limits.output_bytes,
            seconds=seconds,
        )

    async def _run_asking(self, argv: Sequence[str], seconds: float) -> CommandResponse:
        """Start a long command, then ask again and again whether it has ended."""
        deadline = time.monotonic() + seconds
        start = Command(command=["/bin/sh", "-c", START, "sh", *argv], timeout=ANSWER_SECONDS)
        folder = (await self._answer(self._execute(start))).stdout.strip()
        tries = f"{POLL_SECONDS / 0.2:.0f}"
        ask = ["/bin/sh", "-c", ASK, "sh", folder, tries, STILL_RUNNING]
        while time.monotonic() < deadline:
            # A shell's sleep takes a little longer than it was told.
            response = await self._answer(self._execute(Command(command=ask, timeout=2 * POLL_SECONDS)))
            if response.stderr.strip() != STILL_RUNNING:
                return response
        raise SandboxDied(f"{KEY}.backend={self._options.backend}: a command outlived its {seconds:g} s")

    async def write(self, files: Mapping[str, str]) -> None:
        """Write files."""
        for name, content in files.items():
            path = posixpath.normpath(posixpath.join(self._directory, name))
            if not path.startswith(self._directory.rstrip("/") + "/"):
                raise ValueError(f"path {name!r} leads outside; expected a path relative to the working directory")
            await self._answer(self.deployment.runtime.write_file(WriteFileRequest(content=content, path=path)))

    async def close(self) -> None:
        """Stop the deployment."""
        try:
            await self.deployment.stop()
        except FAILURES:
            # It is gone already.
            pass
        finally:
            # A deployment stops once more when it is collected, and complains that it was stopped.
            self.deployment.stop = _nothing_to_stop  # type: ignore[method-assign]
            if self._owned is not None:
                self._owned.close()

    async def _execute(self, command: Command) -> CommandResponse:
        if not self._is_local:
            return await self.deployment.runtime.execute(command)
        # The local runtime blocks its event loop while a command runs; a thread has a loop to spare.
        return await asyncio.to_thread(lambda: asyncio.run(self.deployment.runtime.execute(command)))

    async def _answer(self, call: Coroutine[Any, Any, Answered]) -> Answered:
        try:
            return await call
        except FAILURES as error:
            raise SandboxDied(
                f"{KEY}.backend={self._options.backend} stopped answering: {type(error).__name__}: {error}"
            ) from error


async def _nothing_to_stop(*args: Any, **kwargs: Any) -> None:
    return None
