"""A folder of this machine in which commands run inside bubblewrap.

A command has limits of time, output, memory and processes, an empty environment and no network. All that it starts ends
with it. `processes.bubblewrap` defines what it sees.
"""

import contextlib
import os
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from functools import cache, partial
from pathlib import Path

from tree_rl.rollout.sandbox.errors import SandboxDied
from tree_rl.rollout.sandbox.files.descriptors import (
    FOLDER_FLAGS,
    folder_below,
    hand_over,
    parts_of,
    read_file,
    write_file,
)
from tree_rl.rollout.sandbox.files.trees import copy_exactly, copy_tree, use_of
from tree_rl.rollout.sandbox.ownership import OwnedFolder, remove_left_over_folders
from tree_rl.rollout.sandbox.processes.bounds import SessionBounds
from tree_rl.rollout.sandbox.processes.bubblewrap import (
    MODEL,
    PLACE,
    SEARCH_PATH,
    SYSCALL_FILTER,
    sandbox_argv,
    write_accounts_and_filter,
)
from tree_rl.rollout.sandbox.processes.command import RunningCommand, script_argv
from tree_rl.rollout.sandbox.processes.limits import Limits
from tree_rl.rollout.sandbox.processes.processes import kill_processes_in
from tree_rl.rollout.sandbox.processes.users import own_user

REFUSED = 126
"""Exit status of a command that we cannot pass to a shell."""


@dataclass(frozen=True, kw_only=True, slots=True)
class CommandResult:
    """Result of a command."""

    output: str
    """Standard output and error, interleaved, up to the limit."""
    exit_code: int
    """The shell's exit status; -9 when killed."""
    timed_out: bool
    """True if the wall-clock limit ended it."""
    truncated: bool


class SandboxFolder:
    """Runs commands in a temporary folder. `close` deletes it; after a crash, the next process that creates a sandbox
    does.

    Args:
        files: relative path -> content, written at the start.
        unconfined: True runs commands without bubblewrap.
        readable: further paths that commands see, read-only.

    Raises:
        ValueError: a file cannot be written.
    """

    def __init__(
        self,
        files: Mapping[str, str] | None = None,
        *,
        limits: Limits | None = None,
        unconfined: bool = False,
        readable: Sequence[Path] = (),
    ) -> None:
        self.limits = limits or Limits()
        self.unconfined = unconfined
        self._running: dict[RunningCommand, Limits] = {}
        self._stopped = False
        self._made = time.time()
        self._changed = threading.Condition()
        self._readable = tuple(readable)
        with contextlib.ExitStack() as if_it_fails:
            # A separate user gives each sandbox a process limit and no access to anybody else's files.
            user = own_user()
            if user is not None:
                if_it_fails.callback(user.close)
            self._user_id = None if user is None else user.user_id
            _remove_left_over_once()
            owned = OwnedFolder("sandbox")
            if_it_fails.callback(owned.close)
            self._parent = owned.path
            self._parent.chmod(0o711)
            self.directory = self._parent / "files"
            self.directory.mkdir(mode=0o700)
            self._top = os.open(self.directory, FOLDER_FLAGS)
            if_it_fails.callback(os.close, self._top)
            hand_over(self._top, self._user_id)
            self.model = self._parent / MODEL
            """Folder that commands see, read-only, at `MODEL_PLACE`."""
            self.model.mkdir(mode=0o755)
            self._bounds = SessionBounds(self.limits, has_namespace=not unconfined)
            write_accounts_and_filter(
                self._parent, user_id=self._user_id or os.geteuid(), group_id=self._user_id or os.getegid()
            )
            self.place = str(self.directory) if unconfined else PLACE
            for name, content in (files or {}).items():
                self.write(name, content)
            self._closing = if_it_fails.pop_all()

    def stop(self) -> None:
        """As `Sandbox.stop`; safe from any thread."""
        with self._changed:
            self._stopped = True
            running = tuple(self._running)
        for command in running:
            command.end()
        with self._changed:
            self._changed.wait_for(lambda: not self._running)
        self._end_left_over()

    def close(self) -> None:
        """Stop, and delete the folder. Idempotent; logs what cannot be deleted."""
        self.stop()
        with self._changed:
            self._top = -1
        self._closing.close()

    def copy_to(self, other: "SandboxFolder", *, leave_out: Callable[[str], bool]) -> None:
        """As `Sandbox.copy_to`; raises `ValueError` also for files that cannot be read."""
        with self._open_top() as source, other._open_top() as target:
            try:
                copy_tree(source, target, leave_out=leave_out, max_bytes=self.limits.disk_bytes, owner=other._user_id)
            except OSError as error:
                raise ValueError(f"the files cannot be copied: {error}") from error

    def save(self, folder: Path) -> None:
        """Copy everything into an empty folder, while no command runs.

        Raises `ValueError` if that fails or it has more than `disk_bytes`.
        """
        with self._open_top() as top:
            if use_of(top) > self.limits.disk_bytes:
                raise ValueError(f"the files to copy exceed {self.limits.disk_bytes} bytes")
        copy_exactly(self.directory, folder, owner=None)

    def restore(self, folder: Path) -> None:
        """Fill this new, empty sandbox with what `save` copied. Raises `ValueError` if that fails."""
        copy_exactly(folder, self.directory, owner=self._user_id)

    def run(
        self, command: str, *, environment: Mapping[str, str] | None = None, limits: Limits | None = None
    ) -> CommandResult:
        """Execute a POSIX shell command in the folder and wait for it.

        Args:
            environment: variables besides PATH and HOME.
            limits: of this command; `network` is always the sandbox's.
        """
        limits = replace(limits or self.limits, network=self.limits.network)
        try:
            argv, script = script_argv(command)
        except ValueError as error:
            return CommandResult(output=str(error), exit_code=REFUSED, timed_out=False, truncated=False)
        try:
            running = self._begin(argv, [] if script is None else [script], environment or {}, limits)
        finally:
            if script is not None:
                os.close(script)
        try:
            output, is_truncated, timed_out = running.read_until_exit(
                timeout_seconds=limits.timeout_seconds, output_bytes=limits.output_bytes, look=self._exceeded
            )
        finally:
            status = self._end(running)
        return CommandResult(output=output, exit_code=status, timed_out=timed_out, truncated=is_truncated)

    def _begin(
        self, command: Sequence[str], script: Sequence[int], environment: Mapping[str, str], limits: Limits
    ) -> RunningCommand:
        with self._changed:
            if self._stopped:
                raise SandboxDied("the sandbox was stopped")
            if self._top < 0 or not self.directory.is_dir():
                raise SandboxDied("the sandbox is gone")
            os.fchmod(self._top, 0o700)  # a command may have changed it
            if not self._running:
                self._bounds.begin(self._top)
            with open(self._parent / SYSCALL_FILTER, "rb") as calls:
                argv = partial(
                    sandbox_argv,
                    command,
                    directory=self.directory,
                    user_id=self._user_id,
                    limits=limits,
                    unconfined=self.unconfined,
                    readable=self._readable,
                    calls=calls.fileno(),
                )
                running = RunningCommand(
                    argv,
                    directory=self.directory,
                    environment={"PATH": SEARCH_PATH, "HOME": self.place, **environment},
                    inherited=[calls.fileno(), *script],
                    has_namespace=not self.unconfined,
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
                # Under the lock: otherwise this would kill a command that starts meanwhile.
                self._end_left_over()
            del self._running[running]
            self._changed.notify_all()
        return status

    def _end_left_over(self) -> None:
        """Without a namespace, kill processes that left their process group, as far as we find them."""
        if self.unconfined:
            kill_processes_in(self._parent, since=self._made)

    def _exceeded(self) -> str | None:
        with self._changed:
            running = dict(self._running)
        with self._open_top() as top:
            return self._bounds.exceeded(top, {command.process.pid: limits for command, limits in running.items()})

    def write(self, name: str, content: str) -> None:
        """As `Sandbox.write` for one file. Characters that UTF-8 cannot hold are written as surrogates."""
        *folders, last = parts_of(name)
        if self._stopped:
            raise SandboxDied("the sandbox was stopped")
        text = content.encode("utf-8", errors="surrogatepass")
        with self._open_top() as top:
            try:
                with folder_below(top, folders, make=True, make_for=self._user_id) as folder:
                    write_file(folder, last, text, owner=self._user_id)
            except (FileNotFoundError, FileExistsError, NotADirectoryError, PermissionError) as error:
                raise ValueError(f"sandbox path {name!r} was changed while it was written: {error}") from error

    def read(self, name: str, *, max_bytes: int = 1 << 20) -> str | None:
        """Read a text file; None if there is no such regular file. Paths are refused as by `write`."""
        *folders, last = parts_of(name)
        try:
            with self._open_top() as top, folder_below(top, folders) as folder:
                content = read_file(folder, last, max_bytes=max_bytes)
        except FileNotFoundError:
            return None
        return None if content is None else content.decode("utf-8", errors="replace")

    @contextlib.contextmanager
    def _open_top(self) -> Iterator[int]:
        """A descriptor of the folder that stays open even if another thread closes the sandbox."""
        with self._changed:
            if self._top < 0:
                raise SandboxDied("the sandbox is gone")
            top = os.dup(self._top)
        try:
            yield top
        finally:
            os.close(top)


_remove_left_over_once = cache(remove_left_over_folders)


@cache
def command_threads() -> ThreadPoolExecutor:
    """Threads that wait for commands. Two commands per core run at a time, because commands often wait."""
    return ThreadPoolExecutor(max_workers=2 * (os.cpu_count() or 1), thread_name_prefix="commands")


@cache
def why_no_bubblewrap() -> str | None:
    """bubblewrap's error message if it does not work on this machine, else None."""
    try:
        with contextlib.closing(SandboxFolder()) as probe:
            # The probe forks, because a process limit that counts the trainer's processes fails only then.
            done = probe.run("(:) & wait")
    except (OSError, SandboxDied) as error:
        return str(error)
    return None if done.exit_code == 0 else " ".join(done.output.split()) or f"status {done.exit_code}"
