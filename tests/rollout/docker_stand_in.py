"""A program `docker` that starts SWE-ReX's server on this machine; no Docker runs here."""

import os
import sys
from pathlib import Path

import pytest

PROGRAM = """#!{python}
import json, os, shutil, sys
folder, arguments, server = "{folder}", sys.argv[1:], {server!r}
with open(folder + "/asked.jsonl", "a") as file:
    file.write(json.dumps(arguments) + "\\n")
if arguments[0] == "run":
    name = arguments[arguments.index("--name") + 1]
    with open(folder + "/" + name + ".pid", "w") as file:
        file.write(str(os.getpid()))
    port = arguments[arguments.index("-p") + 1].removesuffix(":8000")
    start = arguments[-1].partition(" || ")[0].split()
    assert arguments[-3:-1] == ["/bin/sh", "-c"] and start[0] == "swerex-remote", arguments
    command = [server, *start[1:], "--host", "127.0.0.1", "--port", port]
    if os.path.isdir(folder + "/image"):
        # Every container has processes and a copy of the image's folder of its own.
        shutil.copytree(folder + "/image", folder + "/" + name, symlinks=True)
        hide = ["--bind", folder + "/" + name, folder + "/testbed", "--unshare-pid", "--proc", "/proc"]
        devices = ["--dev-bind", "/dev", "/dev", "--die-with-parent"]
        command = ["bwrap", "--bind", "/", "/", *devices, *hide, "--", *command]
    os.execvp(command[0], command)
if arguments[0] == "kill":
    os.kill(int(open(folder + "/" + arguments[1] + ".pid").read()), 9)
"""


def put_docker_on_the_path(folder: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The program writes into the folder what it is asked, and NAME.pid for every container."""
    program, server = folder / "docker", str(Path(sys.executable).with_name("swerex-remote"))
    program.write_text(PROGRAM.format(python=sys.executable, folder=folder, server=server))
    program.chmod(0o755)
    monkeypatch.setenv("PATH", f"{folder}{os.pathsep}{os.environ['PATH']}")
    return program
