"""Files of a release name one version, and the package carries its type marker."""

import subprocess
from pathlib import Path

import yaml

import tree_rl

ROOT = Path(__file__).parents[2]


def test_one_version() -> None:
    citation = yaml.safe_load((ROOT / "CITATION.cff").read_text())
    assert citation["version"] == tree_rl.__version__


def test_a_tag_of_this_commit_names_the_version() -> None:
    command = ["git", "tag", "--points-at", "HEAD", "--list", "v*"]
    tags = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True).stdout.split()
    assert set(tags) <= {f"v{tree_rl.__version__}"}


def test_forms_and_hooks_are_yaml() -> None:
    forms = sorted((ROOT / ".github" / "ISSUE_TEMPLATE").glob("*.yml"))
    assert forms and all(yaml.safe_load(form.read_text())["body"] for form in forms)
    assert yaml.safe_load((ROOT / ".pre-commit-config.yaml").read_text())["repos"]
    assert "scripts/test.sh" in str(yaml.safe_load((ROOT / ".github/workflows/tests.yml").read_text())["jobs"])


def test_both_packages_are_typed() -> None:
    assert all((ROOT / package / "py.typed").exists() for package in ("tree_rl", "kernels/tree_kernels"))
