"""Finds a command-line agent on this machine, and the folders that it needs in a sandbox."""

import os
import shutil
import stat
from dataclasses import dataclass
from pathlib import Path

from tree_rl.rollout.sandbox.processes.bubblewrap import SEARCH_PATH, SYSTEM

MODULES = "node_modules"
ENVIRONMENT = "pyvenv.cfg"


@dataclass(frozen=True, kw_only=True, slots=True)
class InstalledProgram:
    """A program and the folders that a `local` sandbox must make readable for it."""

    path: Path
    """Path of the program, with links resolved."""
    readable: tuple[str, ...]
    """Folders that it needs besides the system's programs."""
    search_path: str
    """PATH with its interpreter."""


def find_program(name: str, install: str) -> InstalledProgram:
    """Find a program that npm or pip installed, or a plain executable.

    Args:
        name: name on the PATH, or a path.
        install: command that installs it, for the error.

    Raises:
        ValueError: it is not installed, or the users of sandboxes cannot read it; says the remedy.
    """
    found = shutil.which(name)
    if found is None:
        raise ValueError(
            f"no program {name!r} on the PATH of {os.uname().nodename}: {install}, or name it with options.program"
        )
    path = Path(found).resolve()
    folders = [_folder_of(path)]
    search_path = SEARCH_PATH
    if path.read_bytes()[:64].startswith(b"#!/usr/bin/env node") and (node := shutil.which("node")):
        interpreter = Path(node).resolve()
        folders.append(interpreter.parent)
        search_path = f"{interpreter.parent}:{SEARCH_PATH}"
    if (folders[0] / ENVIRONMENT).is_file():
        # A virtual environment links to a Python in another folder.
        folders.append((folders[0] / "bin" / "python").resolve().parent.parent)
    for folder in folders:
        _check_open(folder)
    shown = [folder for folder in folders if not _is_of_system(folder)]
    return InstalledProgram(path=path, readable=tuple(dict.fromkeys(map(str, shown))), search_path=search_path)


def _folder_of(path: Path) -> Path:
    """The smallest folder that contains a program and its libraries."""
    if MODULES in path.parts:
        return Path(*path.parts[: path.parts.index(MODULES) + 1])
    is_in_environment = (path.parent.parent / ENVIRONMENT).is_file()
    return path.parent.parent if is_in_environment else path.parent


def _is_of_system(folder: Path) -> bool:
    return len(folder.parts) > 1 and folder.parts[1] in SYSTEM


def _check_open(folder: Path) -> None:
    """Raise `ValueError` if the sandboxes' separate users, which exist if the trainer is root, cannot read a folder."""
    if os.geteuid() != 0:
        return
    for place in (folder, *folder.parents):
        if not place.stat().st_mode & stat.S_IXOTH:
            raise ValueError(
                f"{folder} cannot be read in sandboxes, which have users of their own: {place} is closed to others; "
                f"install it elsewhere, such as /opt, or chmod o+x {place}"
            )
