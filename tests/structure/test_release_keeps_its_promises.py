"""What a release promises: entry points of the shell and of verl, one version, pins for every Python."""

import subprocess
from importlib.metadata import distribution, distributions, version
from pathlib import Path

import pytest
import yaml
from packaging.specifiers import SpecifierSet

import tree_rl

ROOT = Path(__file__).parents[2]
PROMISED = {("console_scripts", "tree-rl", "tree_rl.cli:main"), ("verl.plugins", "tree_rl", "tree_rl.verl_plugin")}


def test_entry_points_are_registered_and_load_and_both_packages_are_typed() -> None:
    entries = {(entry.group, entry.name, entry.value): entry for entry in distribution("tree_rl").entry_points}
    assert entries.keys() == PROMISED and all(entry.load() for entry in entries.values())
    assert all((ROOT / package / "py.typed").exists() for package in ("tree_rl", "kernels/tree_kernels"))


def test_one_version_which_a_tag_of_this_commit_names() -> None:
    citation = yaml.safe_load((ROOT / "CITATION.cff").read_text())
    assert tree_rl.__version__ == version("tree_rl") == citation["version"]
    command = ["git", "tag", "--points-at", "HEAD", "--list", "v*"]
    tags = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True).stdout.split()
    assert set(tags) <= {f"v{tree_rl.__version__}"}


# The first releases, as on Debian 12's 3.11.2.
@pytest.mark.parametrize("python", ("3.11.0", "3.12.0"))
def test_no_pinned_package_asks_for_a_later_python(python: str) -> None:
    pins = (ROOT / "constraints" / "cpu.txt").read_text().splitlines()
    asked = {f"{one.name}=={one.version}": str(one.metadata.json.get("requires_python", "")) for one in distributions()}
    pinned = asked.keys() & set(pins)
    assert len(pinned) > 100
    assert [name for name in pinned if not SpecifierSet(asked[name]).contains(python)] == []
