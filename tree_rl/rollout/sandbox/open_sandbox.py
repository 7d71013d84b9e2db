"""Which sandbox a task runs in: one of this machine, or SWE-ReX, imported only where it is asked for."""

from tree_rl.extras import MissingExtraError, require_modules
from tree_rl.rollout.sandbox.local_sandbox import LocalSandbox
from tree_rl.rollout.sandbox.sandbox import KEY, WITH_IMAGE, Sandbox, SandboxError, SandboxOptions


def open_sandbox(options: SandboxOptions, *, image: str | None, directory: str | None) -> Sandbox:
    """Choose the sandbox for a task; it still has to be started.

    Args:
        image: container image that the task needs; None where its files are written.

    Raises:
        SandboxError: the task needs an image and the back end runs none, or SWE-ReX is missing.
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
