"""The extras of the package: the modules that each installs, and the error for a missing one."""

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from importlib.util import find_spec

INSTALLED_BY = {
    **dict.fromkeys(("torch", "transformers", "ortools"), "tree_rl[train]"),
    **dict.fromkeys(
        ("verl", "ray", "tensordict", "transfer_queue", "hydra", "peft", "pandas", "wrapt"), "tree_rl[verl]"
    ),
    **dict.fromkeys(("starlette", "uvicorn", "openai"), "tree_rl[gateway]"),
    **dict.fromkeys(("minisweagent", "litellm", "swerex"), "tree_rl[agents]"),
    "matplotlib": "tree_rl[report]",
    "liger_kernel": "tree_rl[gpu]",
    "openenv": "tree_rl[environments]",
    "verifiers": "verifiers>=0.4,<0.5",
}
"""Requirement that installs each module which the base installation lacks."""


class MissingExtraError(ModuleNotFoundError):
    """A module is not installed; the message says what needs it and how to install it."""

    def __init__(self, needed_by: str, module: str) -> None:
        command = f"; {install_command(module)}" if module in INSTALLED_BY else ""
        super().__init__(f"{needed_by} needs {module}, which is not installed{command}", name=module)


@contextmanager
def missing_extra_as_one_line() -> Iterator[None]:
    """Around the imports of a program: print what is not installed as one line and exit with code 2."""
    try:
        yield
    except MissingExtraError as error:
        print(f"tree_rl: {error}", file=sys.stderr)
        sys.exit(2)


def install_command(module: str) -> str:
    """The command that installs a module of `INSTALLED_BY`."""
    return f"pip install '{INSTALLED_BY[module]}'"


def require_modules(needed_by: str, *modules: str) -> None:
    """Raise a `MissingExtraError` for the first module that is not installed; imports none of them."""
    for module in modules:
        if find_spec(module) is None:
            raise MissingExtraError(needed_by, module)
