"""The commit beside a figure is of the package that ran, whatever repository the process stands in."""

import subprocess
from pathlib import Path

import pytest

import tree_rl
from tree_rl.benchmark.provenance import provenance

ROOT = Path(tree_rl.__file__).resolve().parents[1]


@pytest.mark.skipif(not (ROOT / ".git").exists(), reason="no checkout")
def test_another_repository_does_not_matter(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    subprocess.run(["git", "init", "-q", str(tmp_path)], check=True)
    monkeypatch.chdir(tmp_path)
    command = ["git", "-C", str(ROOT), "describe", "--always", "--dirty", "--exclude", "*"]
    own = subprocess.run(command, capture_output=True, text=True, check=True).stdout.strip()
    assert (provenance()["commit"], provenance(commit="given")["commit"]) == (own, "given")


@pytest.mark.parametrize("lacks", ["repository", "git"])
def test_without_either_the_version_stands(lacks: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    if lacks == "git":
        monkeypatch.setenv("PATH", str(tmp_path))
    else:
        monkeypatch.setattr(tree_rl, "__file__", str(tmp_path / "site-packages" / "tree_rl" / "__init__.py"))
    assert provenance()["commit"] == f"v{tree_rl.__version__}"
