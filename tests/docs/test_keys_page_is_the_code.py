"""docs/keys.md lists every key of the options' dataclasses as the code has it."""

import importlib.util
import re
from dataclasses import fields
from types import ModuleType

import pytest
from shell_blocks import ROOT

PAGE = ROOT / "docs" / "keys.md"


@pytest.fixture(scope="module")
def keys() -> ModuleType:
    spec = importlib.util.spec_from_file_location("site_keys", ROOT / "docs" / "site" / "keys.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_the_page_is_what_the_dataclasses_say(keys: ModuleType) -> None:
    assert PAGE.read_text(encoding="utf-8") == keys.page(), "run: python docs/site/keys.py"


def test_no_key_is_missing_or_unexplained(keys: ModuleType) -> None:
    sections = PAGE.read_text(encoding="utf-8").split("\n## ")[1:]
    for (title, place, options), section in zip(keys.SECTIONS, sections, strict=True):
        assert section.startswith(title) and f"`{place}`" in section
        rows = re.findall(r"(?m)^\| `(\w+)` \| (.+) \| (.+) \| (.+) \|$", section)
        assert [row[0] for row in rows] == [entry.name for entry in fields(options) if entry.name[0] != "_"]
        assert all(len(row[3]) > 10 for row in rows), rows
