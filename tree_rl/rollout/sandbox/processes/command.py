"""One command of a sandbox: started, read, and ended with everything that it started."""

import contextlib
import fcntl
import json
import logging
import os
import selectors
import signal
import subprocess
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from tree_rl.rollout.sandbox.processes.processes import children_of, first_of_namespace, kill_and_wait

logger = logging.getLogger(__name__)

DRAIN_BYTES = 64 << 20
"""Output beyond the kept part is read and dropped up to here, then the command is killed."""
READ_BYTES = 1 << 20
"""Read at a time."""
LOOK_SECONDS = 0.1
"""Time between two looks at what a session uses."""
LONGEST_ARGUMENT_BYTES = 120_000
"""A longer command is handed over as a file: the kernel takes no argument of 128 KiB."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Output:
    """What a command printed, and how it ended."""

    kept: bytes
    is_truncated: bool
    timed_out: bool


class Script:
    """A command for /bin/sh. A long one lies in sealed memory that nobody can alter.

    Raises:
        ValueError: no shell could read it; says why.
    """

    def __init__(self, command: str) -> None:
        if "\0" in command:
            raise ValueError("a command cannot contain a NUL character")
        try:
            text = command.encode("utf-8")
        except UnicodeEncodeError as error:
            raise ValueError(f"a command must be text that UTF-8 can hold: {error}") from error
        self.descriptor: int | None = None
        self.argv = ["/bin/sh", "-c", command]
        if len(text) > LONGEST_ARGUMENT_BYTES:
            self.descriptor = os.memfd_create("command", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
            with open(self.descriptor, "wb", closefd=False) as stream:
                stream.write(text)
            seals = fcntl.F_SEAL_WRITE | fcntl.F_SEAL_GROW | fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_SEAL
            fcntl.fcntl(self.descriptor, fcntl.F_ADD_SEALS, seals)
            self.argv = ["/bin/sh", f"/proc/self/fd/{self.descriptor}"]

    def close(self) -> None:
        """Forget it; a command that began has it still."""
        if self.descriptor is not None:
            os.close(self.descriptor)
            self.descriptor = None


class RunningCommand:
    """A command with what stands in front of it.

    Args:
        argv: of the process; told the descriptor where bubblewrap writes about its namespace.
        inherited: further descriptors that it gets.
        has_namespace: whether all that the command starts lies in a process namespace of its own.
    """

    def __init__(
        self,
        argv: Callable[[int], Sequence[str]],
        *,
        directory: Path,
        environment: Mapping[str, str],
        inherited: Sequence[int],
        has_namespace: bool,
    ) -> None:
        self._has_namespace = has_namespace
        self._lock = threading.Lock()
        self._ended = False
        self._told, tells = os.pipe2(os.O_CLOEXEC | os.O_NONBLOCK)
        try:
            self.process = subprocess.Popen(
                argv(tells),
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                cwd=directory,
                env=dict(environment),
                start_new_session=True,
                pass_fds=[tells, *inherited],
            )
        except BaseException:
            os.close(self._told)
            raise
        finally:
            os.close(tells)

    def end(self) -> int:
        """Kill everything it started, wait until all are dead, and return its exit status. Idempotent; any thread."""
        with self._lock:
            if not self._ended:
                if self._has_namespace:
                    self._end_namespace()
                with contextlib.suppress(ProcessLookupError):
                    os.killpg(self.process.pid, signal.SIGKILL)
                self.process.wait()
                self._ended = True
                os.close(self._told)
            return self.process.returncode

    def _end_namespace(self) -> None:
        """End the namespace by its first process: when that is gone, the others are."""
        outer = self.process.pid
        with contextlib.suppress(ProcessLookupError):
            # Stopped, it starts nothing between our look and its end.
            os.kill(outer, signal.SIGSTOP)
        os.waitid(os.P_PID, outer, os.WSTOPPED | os.WEXITED | os.WNOWAIT)
        found = [first_of_namespace(process_id, outer) for process_id in children_of(outer) | self._namespace_told()]
        descriptors = [descriptor for descriptor in found if descriptor is not None]
        try:
            if not kill_and_wait(descriptors):
                logger.warning("the processes of the command %d do not end", outer)
        finally:
            for descriptor in descriptors:
                os.close(descriptor)

    def _namespace_told(self) -> set[int]:
        """The first process of the namespace, as bubblewrap told: it may outlive bubblewrap's outer process."""
        try:
            text = os.read(self._told, 1 << 12)
        except BlockingIOError:
            return set()
        try:
            return {int(json.loads(text)["child-pid"])}
        except (ValueError, KeyError, TypeError):
            return set()

    def read_until_exit(self, *, timeout_seconds: float, output_bytes: int, look: Callable[[], str | None]) -> Output:
        """Collect output until the shell exits, not until its pipe closes: a background process may hold it open.

        Args:
            output_bytes: kept.
            look: says why the command must end, or None.
        """
        started = time.monotonic()
        kept = bytearray()
        total = 0
        next_look = started + LOOK_SECONDS
        assert self.process.stdout is not None
        pipe = self.process.stdout.fileno()
        os.set_blocking(pipe, False)
        exit_notice = os.pidfd_open(self.process.pid)
        try:
            with selectors.DefaultSelector() as selector:
                selector.register(pipe, selectors.EVENT_READ)
                selector.register(exit_notice, selectors.EVENT_READ)
                exited = False
                while not exited:
                    left = timeout_seconds - (time.monotonic() - started)
                    if left <= 0 or total > DRAIN_BYTES:
                        return Output(kept=bytes(kept), is_truncated=total > len(kept), timed_out=left <= 0)
                    if time.monotonic() >= next_look:
                        if reason := look():
                            noted = bytes(kept) + f"\n[{reason}]".encode()
                            return Output(kept=noted, is_truncated=total > len(kept), timed_out=False)
                        next_look = time.monotonic() + LOOK_SECONDS
                    ready = {key.fd for key, _ in selector.select(min(left, LOOK_SECONDS))}
                    exited = exit_notice in ready
                    if pipe in ready or exited:
                        chunk = _read_available(pipe, READ_BYTES)
                        kept += chunk[: output_bytes - len(kept)]
                        total += len(chunk)
                        if not chunk and not exited:
                            selector.unregister(pipe)
        finally:
            os.close(exit_notice)
        return Output(kept=bytes(kept), is_truncated=total > len(kept), timed_out=False)


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
