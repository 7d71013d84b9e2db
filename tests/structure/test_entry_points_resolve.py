"""What the installed distribution promises to the shell and to verl."""

from importlib.metadata import distribution, version

import pytest

import tree_rl

PROMISED = {"console_scripts": ("tree-rl", "tree_rl.cli:main"), "verl.plugins": ("tree_rl", "tree_rl.verl_plugin")}


@pytest.mark.parametrize("group", PROMISED)
def test_entry_point_is_registered(group: str) -> None:
    entries = [entry for entry in distribution("tree_rl").entry_points if entry.group == group]
    assert [(entry.name, entry.value) for entry in entries] == [PROMISED[group]]


def test_console_script_loads() -> None:
    (script,) = [entry for entry in distribution("tree_rl").entry_points if entry.group == "console_scripts"]
    assert callable(script.load())


def test_version_is_stated_once() -> None:
    assert tree_rl.__version__ == version("tree_rl")
