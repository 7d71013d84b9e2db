"""compat.py is the only module that imports verl or TransferQueue beyond verl's documented plug points."""

import ast
import re
from pathlib import Path

import pytest

from tree_rl.verl_plugin import compat

PLUGIN = Path(compat.__file__).parent
FOLDERS = (PLUGIN, PLUGIN.parent / "benchmark" / "against_verl")
MODULES = sorted(path for folder in FOLDERS for path in folder.rglob("*.py") if path.name != "compat.py")


def foreign_imports(tree: ast.Module) -> set[tuple[str, str]]:
    """(module, name) of every import of verl or transfer_queue, wherever in the module it stands."""
    found = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            found |= {(alias.name, "") for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module and not node.level:
            found |= {(node.module, alias.name) for alias in node.names}
    return {(module, name) for module, name in found if module.split(".")[0] in ("verl", "transfer_queue")}


@pytest.mark.parametrize("path", MODULES, ids=lambda path: path.stem)
def test_module_imports_documented_plug_points_alone(path: Path) -> None:
    allowed = {(module, name) for module, names in compat.DOCUMENTED.items() for name in names}
    assert foreign_imports(ast.parse(path.read_text())) - allowed == set()


@pytest.mark.parametrize("path", MODULES, ids=lambda path: path.stem)
def test_no_import_hides_in_a_string(path: Path) -> None:
    strings = [node.value for node in ast.walk(ast.parse(path.read_text())) if isinstance(node, ast.Constant)]
    hidden = re.compile(r"^\s*(from|import) (verl|transfer_queue)\b", re.MULTILINE)
    assert [text for text in strings if isinstance(text, str) and hidden.search(text)] == []


def test_no_listed_plug_point_or_private_name_is_unused() -> None:
    source = {path: path.read_text() for path in MODULES}
    imported = set().union(*(foreign_imports(ast.parse(text)) for text in source.values()))
    assert {(module, name) for module, names in compat.DOCUMENTED.items() for name in names} == imported
    words = set(re.findall(r"\w+", "".join(source.values())))
    assert set(compat.PRIVATE_NAMES) | set(compat.PRIVATE_MODULES) <= words
