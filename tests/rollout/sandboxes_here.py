"""How tests run sandboxes on this machine: inside bubblewrap where it works."""

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from functools import partial

import pytest

from tree_rl.rollout.sandbox.sandbox import Sandbox, SandboxOptions
from tree_rl.rollout.sandbox.sandbox_folder import SandboxFolder, why_no_bubblewrap

REASON = why_no_bubblewrap()
HERE = SandboxOptions(unconfined=REASON is not None)
"""For scripted agents, which we trust."""
folder_here = partial(SandboxFolder, unconfined=HERE.unconfined)
"""A folder for laws that hold with and without bubblewrap."""
needs_bubblewrap = pytest.mark.skipif(REASON is not None, reason=f"bubblewrap does not work here: {REASON}")
BOTH = [pytest.param(False, id="bubblewrap", marks=needs_bubblewrap), pytest.param(True, id="unconfined")]
"""Values of `unconfined`, for laws that hold with and without bubblewrap."""


@asynccontextmanager
async def started(sandbox: Sandbox) -> AsyncIterator[Sandbox]:
    """A sandbox from its start to its end."""
    try:
        await sandbox.start()
        yield sandbox
    finally:
        await sandbox.close()
