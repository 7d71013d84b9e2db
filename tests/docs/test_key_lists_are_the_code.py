"""docs/configuration.md lists every key of the options' dataclasses as the code has it."""

import importlib.util
import re
from dataclasses import fields
from types import ModuleType

import pytest
from shell_blocks import ROOT

PAGE = ROOT / "docs" / "configuration.md"


@pytest.fixture(scope="module")
def keys() -> ModuleType:
    spec = importlib.util.spec_from_file_location("site_keys", ROOT / "docs" / "site" / "keys.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_every_dataclass_has_its_list_which_is_what_it_says(keys: ModuleType) -> None:
    text = PAGE.read_text(encoding="utf-8")
    assert text == keys.page(text), "run: python docs/site/keys.py"
    assert sorted(name for _, name, _ in keys.MARKED.findall(text)) == sorted(keys.SECTIONS)


def test_no_key_is_missing_or_unexplained(keys: ModuleType) -> None:
    for place, options in keys.SECTIONS.values():
        listed = keys.keys(place, options)
        items = re.findall(r"(?ms)^\* \*\*`(\w+)`\*\*, (?:default )?(.+?)\. (.+?)$(?=\n\*|\n\Z)", listed)
        assert f"`{place}`" in listed
        assert [item[0] for item in items] == [entry.name for entry in fields(options) if entry.name[0] != "_"]
        assert all(len(item[2]) > 10 for item in items), items
