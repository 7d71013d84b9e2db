"""Chooses a task's sandbox: on this machine, or SWE-ReX, which is imported only where a config asks for it."""

from tree_rl.extras import MissingExtraError, require_modules
from tree_rl.rollout.sandbox.local_sandbox import LocalSandbox
from tree_rl.rollout.sandbox.sandbox import KEY, WITH_IMAGE, Sandbox, SandboxError, SandboxOptions


def open_sandbox(options: SandboxOptions, *, image: str | None, directory: str | None) -> Sandbox:
    """Choose the sandbox for a task, which may need a container image; it still has to be started.

    Raises `SandboxError` if the back end does not run the image, or SWE-ReX is missing.
    """
    if image is not None and options.backend not in (*WITH_IMAGE, "remote"):
        raise SandboxError(
            f"{KEY}.backend={options.backend} runs no container, but the task needs the image {image}; set "
            f"{KEY}.backend=docker (or modal, or remote with a server inside that image)"
        )
    if options.backend == "local":
        return LocalSandbox(options)
    try:
        require_modules(f"{KEY}.backend={options.backend}", "swerex")
    except MissingExtraError as error:
        raise SandboxError(str(error)) from error
    from tree_rl.rollout.sandbox.swe_rex_sandbox import SweRexSandbox

    return SweRexSandbox(options, image=image, directory=directory)
