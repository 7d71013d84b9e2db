"""File names that other packages, pytest and transformers would confuse."""

from collections import Counter
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PROJECT_FOLDERS = ("kernels", "kernels/tests", "recipes", "scripts", "examples", "tests")


def test_files_of_all_test_folders_have_distinct_names() -> None:
    names = [path.name for folder in ("tests", "kernels/tests") for path in (ROOT / folder).rglob("*.py")]
    assert names
    twice = {name for name, count in Counter(names).items() if count > 1} - {"conftest.py"}
    assert not twice


@pytest.mark.parametrize("folder", PROJECT_FOLDERS)
def test_project_folders_are_not_packages(folder: str) -> None:
    assert not list((ROOT / folder).glob("__init__.py"))


def test_no_module_shadows_the_package_named_kernels() -> None:
    packages = [path.parent.name for path in ROOT.glob("*/__init__.py")] + [
        path.parent.name for path in (ROOT / "kernels").glob("*/__init__.py")
    ]
    assert sorted(packages) == ["tree_kernels", "tree_rl"]


def test_no_module_is_named_after_what_it_wraps() -> None:
    modules = [path.stem for folder in ("tree_rl", "kernels") for path in (ROOT / folder).rglob("*.py")]
    assert not {"triton", "torch", "utils", "common", "helpers", "manager", "misc"} & set(modules)
