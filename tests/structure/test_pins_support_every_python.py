"""The environment installs on the first release of each Python that the README promises, as on Debian 12's 3.11.2."""

from importlib.metadata import distributions
from pathlib import Path

import pytest
from packaging.specifiers import SpecifierSet

PINS = (Path(__file__).parents[2] / "constraints" / "cpu.txt").read_text().splitlines()


@pytest.mark.parametrize("python", ("3.11.0", "3.12.0"))
def test_no_pinned_package_asks_for_a_later_one(python: str) -> None:
    asked = {f"{one.name}=={one.version}": str(one.metadata.json.get("requires_python", "")) for one in distributions()}
    pinned = asked.keys() & set(PINS)
    assert len(pinned) > 100
    assert [name for name in pinned if not SpecifierSet(asked[name]).contains(python)] == []
