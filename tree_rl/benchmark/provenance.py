"""Where a figure comes from: device, versions, commit, date. No figure is written without it."""

import datetime
import importlib.metadata
import subprocess
from collections.abc import Sequence
from pathlib import Path

import torch

import tree_rl

PACKAGES = ("torch", "triton", "transformers", "flash-attn-4", "nvidia-cutlass-dsl", "liger-kernel")


def provenance(*, commit: str | None = None, packages: Sequence[str] = PACKAGES) -> dict[str, str]:
    """Columns that every row of results carries; the version of an absent package is "".

    `commit` is that of the code that runs; None asks the package.
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
    """Commit of the imported package, whatever repository the process stands in.

    A checkout's short hash, with "-dirty" behind it where tracked files differ; "vX.Y.Z" of an installed package.
    """
    root = Path(tree_rl.__file__).resolve().parents[1]
    if (root / "pyproject.toml").exists() and (root / ".git").exists():
        command = ["git", "-C", str(root), "describe", "--always", "--dirty", "--exclude", "*"]
        try:
            return subprocess.run(command, capture_output=True, text=True, check=True).stdout.strip()
        except (subprocess.CalledProcessError, FileNotFoundError):
            pass  # No git, or a checkout of another user, which git refuses to read.
    return f"v{tree_rl.__version__}"
