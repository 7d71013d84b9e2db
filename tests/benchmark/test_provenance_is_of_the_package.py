"""The commit beside a figure is of the package that ran, whatever repository the process stands in."""

import subprocess
from pathlib import Path

import pytest

import tree_rl
from tree_rl.benchmark.provenance import provenance

ROOT = Path(tree_rl.__file__).resolve().parents[1]


def own_commit() -> str:
    command = ["git", "-C", str(ROOT), "describe", "--always", "--dirty", "--exclude", "*"]
    return subprocess.run(command, capture_output=True, text=True, check=True).stdout.strip()


@pytest.mark.skipif(not (ROOT / ".git").exists(), reason="no checkout")
def test_another_repository_does_not_matter(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    subprocess.run(["git", "init", "-q", str(tmp_path)], check=True)
    monkeypatch.chdir(tmp_path)
    assert provenance()["commit"] == own_commit()
    assert provenance(commit="given")["commit"] == "given"


def test_a_package_outside_git_names_its_version(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tree_rl, "__file__", str(tmp_path / "site-packages" / "tree_rl" / "__init__.py"))
    assert provenance()["commit"] == f"v{tree_rl.__version__}"


def test_without_git_installed_the_version_stands(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    assert provenance()["commit"] == f"v{tree_rl.__version__}"
