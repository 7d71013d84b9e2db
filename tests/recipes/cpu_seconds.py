"""Runs a command and counts the CPU seconds of all processes that it leaves behind, as Ray's are, too.

Usage: python cpu_seconds.py FILE COMMAND...; writes the seconds to the file. Linux alone.
"""

import contextlib
import ctypes
import os
import resource
import subprocess
import sys
from pathlib import Path

PR_SET_CHILD_SUBREAPER = 36


def main() -> None:
    """Exit with the command's status."""
    ctypes.CDLL(None).prctl(PR_SET_CHILD_SUBREAPER, 1)
    code = subprocess.run(sys.argv[2:], check=False).returncode
    with contextlib.suppress(ChildProcessError):
        while True:
            os.wait()
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    Path(sys.argv[1]).write_text(str(used.ru_utime + used.ru_stime))
    sys.exit(code)


if __name__ == "__main__":
    main()
