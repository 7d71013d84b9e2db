"""A browser where the machine has one."""

import shutil
from collections.abc import Iterator

import pytest
from chromium_page import Page, open_browser


@pytest.fixture(scope="session")
def browser(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Page]:
    """One page of a headless Chromium; each test opens its own address in it."""
    found = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)
    if found is None:
        pytest.skip("needs Chromium: apt-get install chromium")
    with open_browser(found, tmp_path_factory.mktemp("chromium")) as page:
        yield page
