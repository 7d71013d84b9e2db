"""Every test repeats: property tests draw the same examples everywhere. With `-n 2` two workers share the files."""

from typing import Any

import pytest
from hypothesis import settings

settings.register_profile("repeatable", derandomize=True, database=None, deadline=None)
settings.load_profile("repeatable")

RAY = "ray"
"""Marker, and group of tests that never run at the same time: two clusters would share ports and memory."""


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """On several workers Ray's tests are one group, and the first: nothing shall wait for it at the end."""
    if not config.getoption("loadgroup", False):
        return
    items.sort(key=lambda item: item.get_closest_marker(RAY) is None)
    for item in items:
        if item.get_closest_marker(RAY) is not None:
            item.add_marker(pytest.mark.xdist_group(RAY))


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> Any:
    """A worker takes whole files, so that each builds its fixtures once, and all of Ray's tests together."""
    from xdist.scheduler import LoadGroupScheduling

    class Files(LoadGroupScheduling):
        def _split_scope(self, nodeid: str) -> str:
            return RAY if nodeid.endswith(f"@{RAY}") else nodeid.split("::")[0]

    return Files(config, log) if config.getoption("dist") == "loadgroup" else None
