"""A browser where the machine has one, and files of rows."""

import json
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

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


@pytest.fixture
def rows_file(tmp_path: Path) -> Callable[[list[dict[str, Any]]], Path]:
    """Writes records as a jsonl file."""

    def write(records: list[dict[str, Any]], name: str = "rows.jsonl") -> Path:
        path = tmp_path / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text("".join(json.dumps(record) + "\n" for record in records))
        return path

    return write
