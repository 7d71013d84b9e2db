"""A sandbox that SWE-ReX reaches; a small script inside it enforces the same limits.

SWE-ReX's server executes one command at a time, so a session's parallel tool calls run one after another.
"""

import asyncio
import base64
import posixpath
import secrets
import shlex
import time
from collections.abc import Callable, Coroutine, Mapping, Sequence
from dataclasses import replace
from typing import Any, TypeVar

import aiohttp
from swerex.deployment.abstract import AbstractDeployment
from swerex.deployment.config import DockerDeploymentConfig, ModalDeploymentConfig, RemoteDeploymentConfig
from swerex.exceptions import SwerexException
from swerex.runtime.abstract import Command, CommandResponse, WriteFileRequest

from tree_rl.rollout.sandbox.container_changes import KILL, MARK, MAX_BYTES, PUT, READ, TAKE, TREE, checked_changes
from tree_rl.rollout.sandbox.processes.limits import Limits
from tree_rl.rollout.sandbox.sandbox import (
    KEY,
    WITH_IMAGE,
    Sandbox,
    SandboxDied,
    SandboxError,
    SandboxOptions,
    for_judge,
)
from tree_rl.rollout.sandbox.sandbox_folder import CommandResult
from tree_rl.rollout.sandbox.uninterrupted import uninterrupted

Answered = TypeVar("Answered")
CONFIGS: Mapping[str, type] = {
    "docker": DockerDeploymentConfig,
    "modal": ModalDeploymentConfig,
    "remote": RemoteDeploymentConfig,
}
FAILURES = (SwerexException, aiohttp.ClientError, OSError, TimeoutError)
"""Errors that SWE-ReX raises when a sandbox does not answer."""
STARTUP_SECONDS = 180.0
TIMED_OUT, KILLED = 124, -9
ANSWER_SECONDS = 15.0
"""Time beyond a command's limit after which its sandbox counts as dead."""
MAX_COMMAND_BYTES = 100_000
REQUEST_SECONDS = 200.0
"""Longest command in one request, as SWE-ReX's client waits 300 s; we start a longer one, then poll for its result."""
POLL_SECONDS = 30.0
STILL_RUNNING = "still running"
JUDGE = "judge"
"""Key in the arguments of `remote` with the server where sessions are judged."""
CHUNK_BYTES = 4 << 20
SCRIPT = """\
cd "$1" || exit 126
output=$(mktemp) || exit 126
ulimit -c 0; ulimit -f "$4"; ulimit -t "$5"; ulimit -v "$6"; export "$8"
timeout -k 2 "$2" /bin/sh -c "$7" >"$output" 2>&1 </dev/null &
group=$!
wait "$group"
status=$?
kill -s KILL -- "-$group" 2>/dev/null
head -c "$3" "$output"
rm -f "$output"
exit "$status"
"""
"""Shell script; arguments: directory, seconds, bytes of output kept, blocks per file, CPU seconds, kilobytes of memory,
command, variable to export. Output goes through a file, so that a background process which holds it open causes no
wait, and the limit of a file's size stops endless output."""

START = """\
folder=$(mktemp -d) || exit 126
run='"$@" >"$0/output"; echo $? >"$0/new"; mv "$0/new" "$0/status"'
setsid /bin/sh -c "$run" "$folder" "$@" >/dev/null 2>&1 </dev/null &
echo "$folder"
"""
"""Shell script; arguments: a command. Prints the folder where its output and status will be."""
ASK = """\
tries=$2
while [ ! -e "$1/status" ]; do
  [ "$tries" -gt 0 ] || { echo "$3" >&2; exit 0; }
  tries=$((tries - 1)); sleep 0.2
done
cat "$1/output"; status=$(cat "$1/status"); rm -rf "$1"; exit "$status"
"""
"""Shell script; arguments: folder, tries, and what to print on stderr if the command still runs."""


class SweRexSandbox:
    """A SWE-ReX deployment.

    Args:
        image: container image for `docker` and `modal`.
        directory: the working directory; None means /workspace.

    Raises:
        SandboxError: SWE-ReX refuses the arguments.
    """

    has_model_port = False

    def __init__(self, options: SandboxOptions, *, image: str | None, directory: str | None) -> None:
        self._options = options
        self._directory = directory or "/workspace"
        self._image = image
        self._mark = secrets.token_hex(8)
        self._is_started = self._is_stopped = False
        self._broken: str | None = None
        given = {name: value for name, value in options.arguments.items() if name != JUDGE}
        if image is not None and options.backend in WITH_IMAGE:
            given["image"] = image
        self._startup_seconds = float(given.pop("startup_timeout", STARTUP_SECONDS))
        if options.backend in WITH_IMAGE:
            given["startup_timeout"] = self._startup_seconds
        try:
            self.deployment: AbstractDeployment = CONFIGS[options.backend](**given).get_deployment()
        # Back ends raise errors of any type: Modal asks its service for a token here.
        except Exception as error:
            raise SandboxError(f"{KEY}.backend={options.backend}, {KEY}.arguments={sorted(given)}: {error}") from error

    def fresh(self) -> "SweRexSandbox":
        """As `Sandbox.fresh`: a new container of the same image; for `remote` the server of `arguments.judge`."""
        arguments = dict(self._options.arguments)
        directory = self._directory
        if self._options.backend == "remote" and JUDGE in arguments:
            arguments = {**{name: value for name, value in arguments.items() if name != JUDGE}, **arguments[JUDGE]}
            arguments[JUDGE] = {}
        elif self._options.backend == "remote":
            if not self._options.unconfined:
                raise SandboxError(
                    f"{KEY}.backend=remote: a session is judged where its agent never was; name a second server of "
                    f"the same image in {KEY}.arguments.{JUDGE} (host, port, auth_token), or set "
                    f"{KEY}.unconfined=true"
                )
            directory += f"-{secrets.token_hex(4)}"
        # The first container still uses its port.
        if self._options.backend == "docker":
            arguments.pop("port", None)
        options = replace(for_judge(self._options), arguments=arguments)
        return SweRexSandbox(options, image=self._image, directory=directory)

    async def start(self) -> None:
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
        self._is_started = True

    async def run(self, command: str) -> CommandResult:
        return await self._run(command, self._options.limits)

    async def run_agent(
        self, command: str, *, variables: Mapping[str, str], gateway: tuple[str, int], port: int, limits: Limits
    ) -> CommandResult:
        """Execute a program that uses the gateway's address, which the container's network must reach."""
        exports = "".join(f"export {name}={shlex.quote(value)}\n" for name, value in variables.items())
        return await self._run(exports + command, limits)

    async def _run(self, command: str, limits: Limits) -> CommandResult:
        self._check_not_stopped()
        # The kernel refuses arguments with a NUL or above 128 kB.
        if "\0" in command or len(command.encode("utf-8", "replace")) > MAX_COMMAND_BYTES:
            reason = (
                f"expected a command of up to {MAX_COMMAND_BYTES} bytes without NUL; write a script to a file in parts"
            )
            return CommandResult(output=reason, exit_code=126, timed_out=False, truncated=False)
        command = command.encode("utf-8", "replace").decode()
        argv = _argv(
            SCRIPT,
            self._directory,
            limits.timeout_seconds,
            limits.output_bytes + 1,
            limits.file_bytes // 512,
            limits.cpu_limit_seconds,
            limits.memory_bytes // 1024,
            command,
            f"{MARK}={self._mark}",
        )
        started = time.monotonic()
        if limits.timeout_seconds <= REQUEST_SECONDS:
            whole = Command(command=argv, timeout=limits.timeout_seconds + ANSWER_SECONDS)
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
        )

    async def _run_asking(self, argv: Sequence[str], seconds: float) -> CommandResponse:
        """Start a long command, then poll until it has ended."""
        deadline = time.monotonic() + seconds
        start = Command(command=_argv(START, *argv), timeout=ANSWER_SECONDS)
        folder = (await self._answer(self._execute(start))).stdout.strip()
        ask = _argv(ASK, folder, f"{POLL_SECONDS / 0.2:.0f}", STILL_RUNNING)
        while time.monotonic() < deadline:
            self._check_not_stopped()
            # Twice the time, because a shell's sleeps take a little longer than requested.
            response = await self._answer(self._execute(Command(command=ask, timeout=2 * POLL_SECONDS)))
            if response.stderr.strip() != STILL_RUNNING:
                return response
        raise SandboxDied(f"{KEY}.backend={self._options.backend}: a command outlived its {seconds:g} s")

    async def write(self, files: Mapping[str, str]) -> None:
        self._check_not_stopped()
        for name, content in files.items():
            path = posixpath.normpath(posixpath.join(self._directory, name))
            if not path.startswith(self._directory.rstrip("/") + "/"):
                raise ValueError(f"path {name!r} leads outside; expected a path relative to the working directory")
            await self._answer(self.deployment.runtime.write_file(WriteFileRequest(content=content, path=path)))

    async def stop(self) -> None:
        """Kill what the session started; may wait until a running command reaches its limit."""
        if self._is_stopped or not self._is_started:
            self._is_stopped = True
            return
        self._is_stopped = True
        try:
            async with asyncio.timeout(self._options.limits.timeout_seconds + 2 * ANSWER_SECONDS):
                killed = await self._script(KILL, self._mark)
            if killed.exit_code != 0:
                self._broken = "its processes cannot be killed"
        except FAILURES as error:
            # The agent may have killed the server in its container; `copy_to` then reports it.
            self._broken = f"{type(error).__name__}: {error}"

    async def copy_to(self, judge: Sandbox, *, leave_out: Callable[[str], bool]) -> None:
        """Close this sandbox and apply the agent's changes in another one of this kind."""
        if not isinstance(judge, SweRexSandbox):
            raise TypeError(f"copy_to: expected a started SweRexSandbox, received {type(judge).__name__}")
        if self._broken is not None:
            raise ValueError(f"the agent's sandbox does not answer: {self._broken}")
        tree = (await judge._answer(judge._script(TREE, judge._directory))).stdout.strip()
        try:
            taken, deleted = await self._take(tree)
        except FAILURES as error:
            raise ValueError(f"the agent's changes cannot be read: {type(error).__name__}: {error}") from error
        await self.close()
        packed, gone = await asyncio.to_thread(checked_changes, taken, deleted, leave_out=leave_out)
        place = f"/tmp/{secrets.token_hex(8)}"
        names = b"".join(name.encode(errors="surrogateescape") + b"\0" for name in gone)
        for suffix, content in ((".gone", names), (".tar", packed)):
            text = base64.b64encode(content).decode()
            await judge._answer(
                judge.deployment.runtime.write_file(WriteFileRequest(content=text, path=place + suffix))
            )
        done = await judge._answer(judge._script(PUT, judge._directory, place))
        if done.exit_code != 0:
            raise ValueError(f"the agent's changes do not fit the repository: {done.stderr[-500:]}")

    async def _take(self, tree: str) -> tuple[bytes, bytes]:
        taken = await self._script(TAKE, self._directory, tree)
        if taken.exit_code != 0:
            raise ValueError(f"the agent's changes cannot be listed: {taken.stderr[-500:]}")
        folder = taken.stdout.strip()
        return await self._read(f"{folder}/tar"), await self._read(f"{folder}/gone")

    async def _read(self, path: str) -> bytes:
        content = b""
        while len(content) <= MAX_BYTES:
            read = await self._script(READ, path, f"{len(content) + 1}", f"{CHUNK_BYTES}")
            chunk = base64.b64decode(read.stdout, validate=True)
            content += chunk
            if len(chunk) < CHUNK_BYTES:
                return content
        raise ValueError(f"the agent's changes exceed {MAX_BYTES} bytes")

    async def _script(self, script: str, *arguments: str) -> CommandResponse:
        """Run one of this module's scripts, without the session's limits."""
        return await self._execute(Command(command=_argv(script, *arguments), timeout=REQUEST_SECONDS))

    def _check_not_stopped(self) -> None:
        if self._is_stopped:
            raise SandboxDied(f"{KEY}.backend={self._options.backend}: the sandbox was stopped")

    async def close(self) -> None:
        await uninterrupted(self._close())

    async def _close(self) -> None:
        self._is_stopped = True
        try:
            await self.deployment.stop()
        except FAILURES:
            # It is gone already.
            pass
        finally:
            # A deployment's destructor stops it again, and warns if it was already stopped.
            self.deployment.stop = _nothing_to_stop  # type: ignore[method-assign]

    async def _execute(self, command: Command) -> CommandResponse:
        return await self.deployment.runtime.execute(command)

    async def _answer(self, call: Coroutine[Any, Any, Answered]) -> Answered:
        try:
            return await call
        except FAILURES as error:
            raise SandboxDied(
                f"{KEY}.backend={self._options.backend} stopped answering: {type(error).__name__}: {error}"
            ) from error


def _argv(script: str, *arguments: object) -> list[str]:
    return ["/bin/sh", "-c", script, "sh", *map(str, arguments)]


async def _nothing_to_stop(*args: Any, **kwargs: Any) -> None:
    return None
