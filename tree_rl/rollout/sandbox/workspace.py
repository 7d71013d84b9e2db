"""A directory of files and a shell in it, where the commands of an agent run.

A command has limits of time, output, memory and processes, an empty environment and no network. What it starts dies
with it. `confinement` says what this protects.
"""

import asyncio
import contextlib
import os
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path

from tree_rl.rollout.sandbox.confined.bounds import SessionBounds
from tree_rl.rollout.sandbox.confined.command import RunningCommand, Script
from tree_rl.rollout.sandbox.confined.descriptors import (
    FOLDER_FLAGS,
    folder_below,
    hand_over,
    parts_of,
    read_file,
    write_file,
)
from tree_rl.rollout.sandbox.confined.processes import kill_processes_in, kill_user
from tree_rl.rollout.sandbox.confined.trees import copy_tree
from tree_rl.rollout.sandbox.confined.users import own_user
from tree_rl.rollout.sandbox.confinement import (
    HIDING,
    SEARCH_PATH,
    Limits,
    Means,
    confined_argv,
    forbids_user_namespaces,
    strictest_means,
)
from tree_rl.rollout.sandbox.errors import SandboxDied, SandboxError
from tree_rl.rollout.sandbox.jail import PLACE, lay_out_jail, write_accounts
from tree_rl.rollout.sandbox.ownership import FILES, OwnedFolder, remove_left_over_folders

REFUSED = 126
"""Exit status of a command that no shell could read."""


@dataclass(frozen=True, kw_only=True, slots=True)
class CommandResult:
    """What a command did."""

    output: str
    """Standard output and error, interleaved, up to the limit."""
    exit_code: int
    """The shell's exit status; -9 when killed."""
    timed_out: bool
    """True if the wall-clock limit ended it."""
    truncated: bool
    """True if output was dropped."""
    seconds: float
    """Wall-clock time."""


class Workspace:
    """A temporary directory that exists until `close`; if this process is killed, until the next one needs a workspace.

    Args:
        files: relative path -> content, written at the start.
        means: how commands are confined; None takes the strictest that works here.
        readable: further paths that commands see, read-only.

    Raises:
        ValueError: a file cannot be written there.
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
        self._running: dict[RunningCommand, Limits] = {}
        self._stopped = False
        self._changed = threading.Condition()
        self._readable = tuple(readable)
        with contextlib.ExitStack() as if_it_fails:
            # A user of its own gives each workspace its own process limit and no rights on anybody's files.
            self._user = own_user()
            if self._user is not None:
                if_it_fails.callback(self._user.close)
            _remove_left_over_once()
            self._owned = OwnedFolder("workspace")
            if_it_fails.callback(self._owned.close)
            self._parent = self._owned.path
            self._parent.chmod(0o711)
            self.directory = self._parent / FILES
            self.directory.mkdir(mode=0o700)
            self._top = os.open(self.directory, FOLDER_FLAGS)
            if_it_fails.callback(os.close, self._top)
            hand_over(self._top, self._user_id)
            self.door = self._parent / "door"
            """Folder that commands see, read-only, at `jail.DOOR`."""
            self.door.mkdir(mode=0o755)
            self._bounds = SessionBounds(
                self.limits,
                user_id=self._user_id,
                has_namespace=self.means != "limits",
                is_closed=forbids_user_namespaces(self.means),
                folder=self._parent,
            )
            if_it_fails.callback(self._bounds.close)
            if self.means in HIDING:
                write_accounts(self._parent, **self._ids_seen())
            if self.means == "mounts":
                lay_out_jail(self._parent, self.directory, network=self.limits.network, readable=self._readable)
            self.place = PLACE if self.means in HIDING else str(self.directory)
            for name, content in (files or {}).items():
                self.write(name, content)
            if_it_fails.pop_all()

    @property
    def _user_id(self) -> int | None:
        return None if self._user is None else self._user.user_id

    def _ids_seen(self) -> dict[str, int]:
        """User and group of commands as they see them; without root, `mounts` shows them as root."""
        if self._user_id is not None:
            return {"user_id": self._user_id, "group_id": self._user_id}
        is_root_inside = self.means == "mounts"
        return {
            "user_id": 0 if is_root_inside else os.geteuid(),
            "group_id": 0 if is_root_inside else os.getegid(),
        }

    def stop(self) -> None:
        """Kill everything that commands started, and return when all is dead and every call of `run` has returned.

        Later calls of `run` and `write` raise `SandboxDied`. Idempotent, and safe from any thread.
        """
        with self._changed:
            self._stopped = True
            running = tuple(self._running)
        for command in running:
            command.end()
        with self._changed:
            self._changed.wait_for(lambda: not self._running)
        self._bounds.kill_all()
        self._end_left_over()

    def close(self) -> None:
        """Stop, and remove the directory. Idempotent; what cannot be removed is logged."""
        self.stop()
        with self._changed:
            if self._top >= 0:
                os.close(self._top)
                self._top = -1
        self._bounds.close()
        self._owned.close()
        if self._user is not None:
            self._user.close()

    def fresh(self) -> "Workspace":
        """An empty workspace of another user, with the same limits, means and readable paths.

        Raises:
            SandboxError: commands of this one could reach it: this process is not root, and there are no namespaces.
        """
        if self.means == "limits" and self._user is None:
            raise SandboxError(
                "no separate place for a judge: without root and without namespaces, commands could leave processes "
                "that reach it; run as root, or where bubblewrap or namespaces work"
            )
        return Workspace(limits=self.limits, means=self.means, readable=self._readable)

    def copy_to(self, other: "Workspace", *, leave_out: Callable[[str], bool]) -> None:
        """Copy regular files, and links that stay inside, to another workspace's user. Call `stop` first.

        Args:
            leave_out: is told the relative path of a file or link; True leaves it out.

        Raises:
            ValueError: the files are too many, too deep or too large, or cannot be read.
        """
        with self._open_top() as source, other._open_top() as target:
            try:
                copy_tree(
                    source,
                    target,
                    leave_out=leave_out,
                    max_bytes=self.limits.disk_bytes,
                    owner=other._user_id,
                )
            except OSError as error:
                raise ValueError(f"the files cannot be copied: {error}") from error

    def run(
        self, command: str, *, environment: Mapping[str, str] | None = None, limits: Limits | None = None
    ) -> CommandResult:
        """Execute a POSIX shell command in the directory and wait for it.

        Args:
            environment: variables besides PATH and HOME.
            limits: for this command; its network stays the workspace's.

        Raises:
            SandboxDied: the workspace was stopped.
        """
        limits = replace(limits or self.limits, network=self.limits.network)
        started = time.monotonic()
        try:
            script = Script(command)
        except ValueError as error:
            return CommandResult(output=str(error), exit_code=REFUSED, timed_out=False, truncated=False, seconds=0.0)
        with contextlib.closing(script):
            running = self._begin(script, environment or {}, limits)
        try:
            read = running.read_until_exit(
                timeout_seconds=limits.timeout_seconds,
                output_bytes=limits.output_bytes,
                look=self._exceeded,
            )
        except BaseException:
            self._end(running)
            raise
        status = self._end(running)
        kept = read.kept
        if status != 0 and (reason := self._bounds.killed_for()):
            kept += f"\n[{reason}]".encode()
        return CommandResult(
            output=kept.decode("utf-8", errors="replace"),
            exit_code=status,
            timed_out=read.timed_out,
            truncated=read.is_truncated,
            seconds=time.monotonic() - started,
        )

    def _begin(self, script: Script, environment: Mapping[str, str], limits: Limits) -> RunningCommand:
        """Start a command, unless the workspace was stopped; after `stop` none starts."""

        def argv(info: int) -> list[str]:
            return confined_argv(
                script.argv,
                directory=self.directory,
                user_id=self._user_id,
                limits=limits,
                means=self.means,
                readable=self._readable,
                info=info,
                group=self._bounds.group,
            )

        with self._changed:
            if self._stopped:
                raise SandboxDied("the workspace was stopped")
            self._repair()
            self._bounds.begin(self._top, [limits, *self._running.values()])
            running = RunningCommand(
                argv,
                directory=self.directory,
                environment={"PATH": SEARCH_PATH, "HOME": self.place, **environment},
                inherited=() if script.descriptor is None else (script.descriptor,),
                has_namespace=self.means != "limits",
            )
            self._running[running] = limits
        return running

    def _end(self, running: RunningCommand) -> int:
        status = running.end()
        assert running.process.stdout is not None
        running.process.stdout.close()
        with self._changed:
            is_last = len(self._running) == 1
            if is_last:
                # Under the lock: a command that began meanwhile would die as a left-over.
                self._end_left_over()
            del self._running[running]
            self._changed.notify_all()
        return status

    def _end_left_over(self) -> None:
        """Kill what no namespace ends: processes that left their group."""
        if self.means != "limits":
            return
        if self._user_id is not None:
            kill_user(self._user_id)
        else:
            kill_processes_in(self._parent)

    def _repair(self) -> None:
        """Make the directory usable, whatever a command did to it."""
        if self._top < 0 or not self.directory.is_dir():
            raise SandboxDied("the workspace is gone")
        os.fchmod(self._top, 0o700)

    def _exceeded(self) -> str | None:
        """Which limit the session exceeds."""
        with self._changed:
            running = dict(self._running)
        with self._open_top() as top:
            return self._bounds.exceeded(top, {command.process.pid: limits for command, limits in running.items()})

    async def run_async(self, command: str) -> CommandResult:
        """`run` without blocking the event loop. Of all commands two per core run at a time, as they also wait."""
        return await asyncio.get_running_loop().run_in_executor(command_threads(), self.run, command)

    def write(self, name: str, content: str) -> None:
        """Write a text file, creating its folders. Characters that UTF-8 cannot hold are written as surrogates.

        Raises:
            ValueError: the path leads outside, or through a link.
            SandboxDied: the workspace was stopped.
        """
        *folders, last = parts_of(name)
        if self._stopped:
            raise SandboxDied("the workspace was stopped")
        text = content.encode("utf-8", errors="surrogatepass")
        with self._open_top() as top:
            try:
                with folder_below(top, folders, make=True, make_for=self._user_id) as folder:
                    write_file(folder, last, text, owner=self._user_id)
            except (FileNotFoundError, FileExistsError, NotADirectoryError, PermissionError) as error:
                raise ValueError(f"workspace path {name!r} was changed while it was written: {error}") from error

    def read(self, name: str, *, max_bytes: int = 1 << 20) -> str | None:
        """Read a text file; None if there is no such regular file.

        Raises:
            ValueError: the path leads outside, or through a link.
        """
        *folders, last = parts_of(name)
        try:
            with self._open_top() as top, folder_below(top, folders) as folder:
                content = read_file(folder, last, max_bytes=max_bytes)
        except FileNotFoundError:
            return None
        return None if content is None else content.decode("utf-8", errors="replace")

    @contextlib.contextmanager
    def _open_top(self) -> Iterator[int]:
        """A descriptor of the directory that stays open although another thread closes the workspace."""
        with self._changed:
            if self._top < 0:
                raise SandboxDied("the workspace is gone")
            top = os.dup(self._top)
        try:
            yield top
        finally:
            os.close(top)


_remove_left_over_once = cache(remove_left_over_folders)


@cache
def command_threads() -> ThreadPoolExecutor:
    """Threads that wait for commands."""
    return ThreadPoolExecutor(max_workers=2 * (os.cpu_count() or 1), thread_name_prefix="workspace")
