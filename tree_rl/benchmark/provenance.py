"""Where a figure comes from: device, versions, commit, date. No figure is written without it."""

import datetime
import importlib.metadata
import subprocess
from collections.abc import Sequence

import torch

from tree_rl.inspection.files import InputError

PACKAGES = ("torch", "triton", "transformers", "flash-attn-4", "nvidia-cutlass-dsl", "liger-kernel")


def provenance(*, commit: str | None = None, packages: Sequence[str] = PACKAGES) -> dict[str, str]:
    """Columns that every row of results carries.

    Args:
        commit: of the code that runs; None asks git.
        packages: distributions whose versions count; one that is absent is written as "".

    Raises:
        InputError: no commit given and no git checkout around.
    """
    versions = {name.replace("-", "_"): _version(name) for name in packages}
    return {
        "device": torch.cuda.get_device_name() if torch.cuda.is_available() else "cpu",
        **versions,
        "commit": commit or _commit(),
        "date": datetime.date.today().isoformat(),
    }


def _version(package: str) -> str:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return ""


def _commit() -> str:
    """Short hash of the checkout, with "-dirty" behind it where tracked files differ."""
    command = ["git", "describe", "--always", "--dirty", "--exclude", "*"]
    try:
        return subprocess.run(command, capture_output=True, text=True, check=True).stdout.strip()
    except (subprocess.CalledProcessError, FileNotFoundError) as error:
        raise InputError("expected a git checkout, found none; name the commit with --commit") from error
