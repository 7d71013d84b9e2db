"""Tracked files name no registry and no path of one machine."""

import re
import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
TEXT = {".py", ".sh", ".md", ".toml", ".yaml", ".yml", ".txt", ".jinja", ".json", ".jsonl", ".cfg", ".html", ""}
NOT_FOR_THE_REPOSITORY = {
    "package registry": re.compile(r"pypi\.(org|python)|pythonhosted\.|download\.pytorch\.|/opt/(wheels|pypi)|nexus\."),
    "path of one machine": re.compile(r"(?<![\w.$}/-])/(work/(main|shared)|home/[a-z]|Users/[a-z])"),
}


@pytest.mark.parametrize("kind", NOT_FOR_THE_REPOSITORY)
def test_no_tracked_file_names_a(kind: str) -> None:
    listed = subprocess.run(["git", "ls-files"], cwd=ROOT, capture_output=True, text=True, check=True).stdout
    files = [path for path in map(ROOT.joinpath, listed.splitlines()) if path.is_file() and path.suffix in TEXT]
    assert len(files) > 10
    found = [
        f"{path.relative_to(ROOT)}: {match.group()}"
        for path in files
        for match in NOT_FOR_THE_REPOSITORY[kind].finditer(path.read_text(encoding="utf-8"))
    ]
    assert not found
