"""Runs a command and counts the CPU seconds that all its processes have used when it prints a text.

Usage: python cpu_seconds.py FILE TEXT COMMAND...; writes the seconds to the file. Linux alone: this process
adopts Ray's daemons.
"""

import contextlib
import ctypes
import subprocess
import sys
import threading
from pathlib import Path

import psutil

PR_SET_CHILD_SUBREAPER = 36
EVERY_SECONDS = 0.5


def count(is_over: threading.Event) -> float:
    """Add up until then: processes that end are reaped by their own parents without a trace."""
    used: dict[int, float] = {}
    while not is_over.wait(EVERY_SECONDS):
        for one in psutil.Process().children(recursive=True):
            with contextlib.suppress(psutil.NoSuchProcess):
                times = one.cpu_times()
                used[one.pid] = times.user + times.system
    return sum(used.values())


def main() -> None:
    """Exit with the command's status."""
    file, text, *command = sys.argv[1:]
    ctypes.CDLL(None).prctl(PR_SET_CHILD_SUBREAPER, 1)
    is_over = threading.Event()
    counter = threading.Thread(target=lambda: Path(file).write_text(str(count(is_over))))
    counter.start()
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        for line in process.stdout:
            print(line, end="", flush=True)
            if text in line:
                is_over.set()
    is_over.set()
    counter.join()
    sys.exit(process.returncode)


if __name__ == "__main__":
    main()
