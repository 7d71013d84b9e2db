"""The public names that the page about the code lists can be imported from where it says."""

import pkgutil
import re
from pathlib import Path

import pytest

PAGE = Path(__file__).parents[2] / "docs" / "code.md"
NAMES = re.findall(r"`((?:tree_rl|tree_kernels)\.[\w.]+)`", PAGE.read_text().split("## Public names")[1])


@pytest.mark.parametrize("name", NAMES)
def test_a_public_name_is_importable(name: str) -> None:
    pkgutil.resolve_name(name)
