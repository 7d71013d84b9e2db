"""A browser where the machine has one, and files of rows."""

import json
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from chromium_page import Page, open_browser

EXAMPLES = Path(__file__).parents[2] / "examples"


@pytest.fixture(scope="session")
def browser(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Page]:
    """One page of a headless Chromium; each test opens its own address in it."""
    found = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)
    if found is None:
        pytest.skip("needs Chromium: apt-get install chromium")
    with open_browser(found, tmp_path_factory.mktemp("chromium")) as page:
        yield page


@pytest.fixture(scope="session")
def qwen_tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tokenizer folder with the Qwen vocabulary."""
    folder = tmp_path_factory.mktemp("qwen_tokenizer")
    subprocess.run([sys.executable, str(EXAMPLES / "write_qwen_tokenizer.py"), str(folder)], check=True, timeout=120)
    return folder


@pytest.fixture
def rows_file(tmp_path: Path) -> Callable[[list[dict[str, Any]]], Path]:
    """Writes records as a jsonl file."""

    def write(records: list[dict[str, Any]], name: str = "rows.jsonl") -> Path:
        path = tmp_path / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text("".join(json.dumps(record) + "\n" for record in records))
        return path

    return write
