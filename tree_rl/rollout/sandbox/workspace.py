"""A directory of files and a shell in it, where the commands of an agent run.

A command has limits of time, output, memory and processes, an empty environment and no network. What it starts dies
with it. `confinement` says what this protects.
"""

import asyncio
import os
import secrets
import selectors
import signal
import subprocess
import time
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path

from tree_rl.rollout.sandbox.confinement import HIDING, Limits, Means, command_users, confined_argv, strictest_means
from tree_rl.rollout.sandbox.jail import PLACE, lay_out_jail
from tree_rl.rollout.sandbox.ownership import OwnedFolder, remove_left_over_folders

SEARCH_PATH = "/usr/local/bin:/usr/bin:/bin"
DRAIN_BYTES = 64 << 20
"""Output beyond the kept part is read and dropped up to here, then the command is killed."""
READ_BYTES = 1 << 20
"""Read at a time."""
DISK_CHECK_SECONDS = 0.25
"""Time between two looks at the size of the directory."""


@dataclass(frozen=True, kw_only=True, slots=True)
class CommandResult:
    """What a command did."""

    output: str
    """Standard output and error, interleaved, up to the limit."""
    exit_code: int
    """The shell's exit status; -9 when killed."""
    timed_out: bool
    """Whether the wall-clock limit ended it."""
    truncated: bool
    """Whether output was dropped."""
    seconds: float
    """Wall-clock time."""


class Workspace:
    """A temporary directory that exists until `close`; if this process is killed, until the next one needs a workspace.

    Args:
        files: relative path -> content, written at the start.
        means: how commands are confined; None takes the strictest that works here.
        readable: further paths that commands see, read-only.
    """

    def __init__(
        self,
        files: Mapping[str, str] | None = None,
        *,
        limits: Limits | None = None,
        means: Means | None = None,
        readable: Sequence[Path] = (),
    ) -> None:
        self.limits = limits or Limits()
        self.means = means or strictest_means()
        # A user of its own gives each workspace its own process limit and no rights on anybody's files.
        self._user_id = secrets.choice(command_users()) if os.geteuid() == 0 else None
        self._running: set[subprocess.Popen[bytes]] = set()
        _remove_left_over_once()
        self._owned = OwnedFolder("workspace")
        self._parent = self._owned.path
        self._parent.chmod(0o711)
        self.directory = self._parent / "files"
        self.directory.mkdir(mode=0o700)
        self._hand_over(self.directory)
        self.door = self._parent / "door"
        """Folder that commands see, read-only, at `jail.DOOR`."""
        self.door.mkdir(mode=0o755)
        self._readable = tuple(readable)
        if self.means == "mounts":
            lay_out_jail(self._parent, self.directory, network=self.limits.network, readable=self._readable)
        self.place = PLACE if self.means in HIDING else str(self.directory)
        for name, content in (files or {}).items():
            self.write(name, content)

    def close(self) -> None:
        """Kill what still runs and remove the directory. Idempotent."""
        for process in tuple(self._running):
            _kill_group(process)
        self._owned.close()

    def run(
        self, command: str, *, environment: Mapping[str, str] | None = None, limits: Limits | None = None
    ) -> CommandResult:
        """Execute a POSIX shell command in the directory and wait for it.

        Args:
            environment: variables besides PATH and HOME.
            limits: for this command; its network stays the workspace's.
        """
        limits = limits or self.limits
        argv = confined_argv(
            ["/bin/sh", "-c", command],
            directory=self.directory,
            user_id=self._user_id,
            limits=replace(limits, network=self.limits.network),
            means=self.means,
            readable=self._readable,
        )
        started = time.monotonic()
        process = subprocess.Popen(
            argv,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            cwd=self.directory,
            env={"PATH": SEARCH_PATH, "HOME": self.place, **(environment or {})},
            start_new_session=True,
        )
        self._running.add(process)
        try:
            kept, truncated, timed_out = _read_until_exit(process, limits, started, self.directory)
        finally:
            _kill_group(process)
            self._running.discard(process)
            process.stdout.close()  # type: ignore[union-attr]
        return CommandResult(
            output=kept.decode("utf-8", errors="replace"),
            exit_code=process.wait(),
            timed_out=timed_out,
            truncated=truncated,
            seconds=time.monotonic() - started,
        )

    async def run_async(self, command: str) -> CommandResult:
        """`run` without blocking the event loop. Of all commands two per core run at a time, as they also wait."""
        return await asyncio.get_running_loop().run_in_executor(_command_threads(), self.run, command)

    def write(self, name: str, content: str) -> None:
        """Write a text file, creating its folders. Raises `ValueError` if the path leads outside."""
        path = self._inside(name)
        for folder in reversed(path.relative_to(self.directory).parents[:-1]):
            if not (self.directory / folder).is_dir():
                (self.directory / folder).mkdir()
                self._hand_over(self.directory / folder)
        path.write_text(content)
        self._hand_over(path)

    def read(self, name: str, *, max_bytes: int = 1 << 20) -> str | None:
        """Read a text file; None if there is no such regular file inside the directory.

        Raises:
            ValueError: the path leads outside, also through a link.
        """
        path = self._inside(name)
        if not path.is_file():
            return None
        with path.open("rb") as stream:
            return stream.read(max_bytes).decode("utf-8", errors="replace")

    def _inside(self, name: str) -> Path:
        path = (self.directory / name).resolve()
        if not path.is_relative_to(self.directory.resolve()):
            raise ValueError(f"workspace path {name!r} leads outside; expected a path relative to the workspace")
        return path

    def _hand_over(self, path: Path) -> None:
        if self._user_id is not None:
            os.chown(path, self._user_id, self._user_id)


def _read_until_exit(
    process: subprocess.Popen[bytes], limits: Limits, started: float, directory: Path
) -> tuple[bytes, bool, bool]:
    """Collect output until the shell exits, not until its pipe closes: a background process may hold it open."""
    kept = bytearray()
    total = 0
    exited = False
    next_look = started + DISK_CHECK_SECONDS
    pipe = process.stdout.fileno()  # type: ignore[union-attr]
    os.set_blocking(pipe, False)
    exit_notice = os.pidfd_open(process.pid)
    try:
        with selectors.DefaultSelector() as selector:
            selector.register(pipe, selectors.EVENT_READ)
            selector.register(exit_notice, selectors.EVENT_READ)
            while not exited:
                left = limits.timeout_seconds - (time.monotonic() - started)
                if left <= 0 or total > DRAIN_BYTES:
                    return bytes(kept), total > len(kept), left <= 0
                if time.monotonic() >= next_look:
                    looked = time.monotonic()
                    if disk_use(directory) > limits.disk_bytes:
                        return bytes(kept) + b"\n[disk limit exceeded]", total > len(kept), False
                    # A large directory is looked at more rarely, so that looking costs a twentieth of the time.
                    next_look = time.monotonic() + max(DISK_CHECK_SECONDS, 20 * (time.monotonic() - looked))
                ready = {key.fd for key, _ in selector.select(min(left, DISK_CHECK_SECONDS))}
                exited = exit_notice in ready
                if pipe in ready or exited:
                    chunk = _read_available(pipe, READ_BYTES)
                    kept += chunk[: limits.output_bytes - len(kept)]
                    total += len(chunk)
                    if not chunk and not exited:
                        selector.unregister(pipe)
    finally:
        os.close(exit_notice)
    return bytes(kept), total > len(kept), False


def disk_use(directory: Path) -> int:
    """Bytes of all regular files below a directory."""
    total = 0
    folders = [str(directory)]
    while folders:
        try:
            with os.scandir(folders.pop()) as entries:
                for entry in entries:
                    if entry.is_dir(follow_symlinks=False):
                        folders.append(entry.path)
                    else:
                        total += entry.stat(follow_symlinks=False).st_blocks * 512
        except (FileNotFoundError, PermissionError, NotADirectoryError):
            # The command changes the directory meanwhile.
            continue
    return total


def _read_available(pipe: int, most: int) -> bytes:
    chunks = bytearray()
    while len(chunks) <= most:
        try:
            chunk = os.read(pipe, 1 << 16)
        except BlockingIOError:
            break
        if not chunk:
            break
        chunks += chunk
    return bytes(chunks)


def _kill_group(process: subprocess.Popen[bytes]) -> None:
    try:
        os.killpg(process.pid, signal.SIGKILL)
    except ProcessLookupError:
        return


_remove_left_over_once = cache(remove_left_over_folders)


@cache
def _command_threads() -> ThreadPoolExecutor:
    return ThreadPoolExecutor(max_workers=2 * (os.cpu_count() or 1), thread_name_prefix="workspace")
