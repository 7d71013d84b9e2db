"""Starts one command of a sandbox, reads its output, and kills everything it started."""

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
from pathlib import Path

from tree_rl.rollout.sandbox.processes.processes import children_of, first_of_namespace, kill_and_wait

logger = logging.getLogger(__name__)

DRAIN_BYTES = 64 << 20
"""Total output after which we kill a command. Up to here we drop what exceeds the kept part."""
LARGEST_PIPE_BYTES = 1 << 20
"""Most bytes that the kernel keeps in a pipe; 64 KiB unless a process asks for more."""
LOOK_SECONDS = 0.1
"""Time between two checks of the session's limits."""
LONGEST_ARGUMENT_BYTES = 120_000
"""Longest command passed as an argument; a longer one becomes a file, as the kernel refuses arguments of 128 KiB."""


def script_argv(command: str) -> tuple[list[str], int | None]:
    """The argv of a command for /bin/sh.

    With a descriptor to pass on for a long command, which lies in a sealed memory file that nobody can change. Raises
    `ValueError` for a NUL, or characters that UTF-8 cannot encode.
    """
    if "\0" in command:
        raise ValueError("a command cannot contain a NUL character")
    try:
        text = command.encode("utf-8")
    except UnicodeEncodeError as error:
        raise ValueError(f"a command must be text that UTF-8 can hold: {error}") from error
    if len(text) <= LONGEST_ARGUMENT_BYTES:
        return ["/bin/sh", "-c", command], None
    descriptor = os.memfd_create("command", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
    with open(descriptor, "wb", closefd=False) as stream:
        stream.write(text)
    seals = fcntl.F_SEAL_WRITE | fcntl.F_SEAL_GROW | fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_SEAL
    fcntl.fcntl(descriptor, fcntl.F_ADD_SEALS, seals)
    return ["/bin/sh", f"/proc/self/fd/{descriptor}"], descriptor


class RunningCommand:
    """The process of a command, wrapped in its sandbox.

    Args:
        argv: makes the process's argv from the descriptor to which bubblewrap writes about its namespace.
        inherited: further descriptors for the process.
        has_namespace: True if the command has a process namespace for all that it starts.
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
        self._info, info_to_write = os.pipe2(os.O_CLOEXEC | os.O_NONBLOCK)
        try:
            self.process = subprocess.Popen(
                argv(info_to_write),
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                cwd=directory,
                env=dict(environment),
                start_new_session=True,
                pass_fds=[info_to_write, *inherited],
            )
        except BaseException:
            os.close(self._info)
            raise
        finally:
            os.close(info_to_write)

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
                os.close(self._info)
            return self.process.returncode

    def _end_namespace(self) -> None:
        """Kill the namespace's first process; the kernel then kills the others."""
        outer = self.process.pid
        with contextlib.suppress(ProcessLookupError):
            # A stopped process starts nothing between our listing of its children and its end.
            os.kill(outer, signal.SIGSTOP)
        os.waitid(os.P_PID, outer, os.WSTOPPED | os.WEXITED | os.WNOWAIT)
        found = [first_of_namespace(process_id, outer) for process_id in children_of(outer) | self._first_process()]
        descriptors = [descriptor for descriptor in found if descriptor is not None]
        try:
            if not kill_and_wait(descriptors):
                logger.warning("the processes of the command %d do not end", outer)
        finally:
            for descriptor in descriptors:
                os.close(descriptor)

    def _first_process(self) -> set[int]:
        """The namespace's first process as reported by bubblewrap, whose outer process it may outlive."""
        try:
            text = os.read(self._info, 1 << 12)
        except BlockingIOError:
            return set()
        try:
            return {int(json.loads(text)["child-pid"])}
        except (ValueError, KeyError, TypeError):
            return set()

    def read_until_exit(
        self, *, timeout_seconds: float, output_bytes: int, look: Callable[[], str | None]
    ) -> tuple[str, bool, bool]:
        """Collect output until the shell exits, not until its pipe closes: a background process may hold it open.

        `look` returns the reason if the command must end, else None.

        Returns:
            What the command printed, up to `output_bytes`; True if it printed more; and True if its time was up.
        """
        started = time.monotonic()
        kept, total, note = bytearray(), 0, ""
        exited = timed_out = False
        next_look = started + LOOK_SECONDS
        assert self.process.stdout is not None
        pipe = self.process.stdout.fileno()
        os.set_blocking(pipe, False)
        exit_notice = os.pidfd_open(self.process.pid)
        try:
            with selectors.DefaultSelector() as selector:
                selector.register(pipe, selectors.EVENT_READ)
                selector.register(exit_notice, selectors.EVENT_READ)
                while not exited:
                    left = timeout_seconds - (time.monotonic() - started)
                    timed_out = left <= 0
                    if timed_out or total > DRAIN_BYTES:
                        break
                    if time.monotonic() >= next_look:
                        if reason := look():
                            note = f"\n[{reason}]"
                            break
                        next_look = time.monotonic() + LOOK_SECONDS
                    ready = {key.fd for key, _ in selector.select(min(left, LOOK_SECONDS))}
                    exited = exit_notice in ready
                    if pipe in ready or exited:
                        chunk = _read_available(pipe)
                        kept += chunk[: output_bytes - len(kept)]
                        total += len(chunk)
                        if not chunk and not exited:
                            selector.unregister(pipe)
        finally:
            os.close(exit_notice)
        return kept.decode("utf-8", errors="replace") + note, total > len(kept), timed_out


def _read_available(pipe: int) -> bytes:
    """What the pipe holds; empty at its end, or if it holds nothing yet."""
    try:
        return os.read(pipe, LARGEST_PIPE_BYTES)
    except BlockingIOError:
        return b""
