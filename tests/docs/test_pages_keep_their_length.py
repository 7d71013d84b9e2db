"""The README fits on a few screens, and what a user reads stays at half of what it was."""

import subprocess
from pathlib import Path

ROOT = Path(__file__).parents[2]
FOR_DEVELOPERS = ("log", "commands", "verl_options", "code", "numerics", "extend", "api")
README_LINES, README_WORDS, USER_WORDS = 130, 1300, 25_000


def words(page: Path) -> int:
    """As `wc -w` counts them."""
    return len(page.read_text().split())


def is_for_users(page: Path) -> bool:
    """The README, the recipes, and the pages of docs/ outside the site's part for developers."""
    relative = page.relative_to(ROOT)
    if relative.parts[:2] == ("docs", "benchmarks"):
        return page.name == "README.md"
    is_of_the_site = relative.parts[0] in ("docs", "recipes", "examples")
    return str(relative) == "README.md" or (is_of_the_site and page.stem not in FOR_DEVELOPERS)


def test_the_readme_and_the_users_pages_are_short() -> None:
    readme = ROOT / "README.md"
    assert len(readme.read_text().splitlines()) <= README_LINES and words(readme) <= README_WORDS
    listed = subprocess.run(["git", "ls-files", "*.md"], cwd=ROOT, capture_output=True, text=True, check=True).stdout
    counted = {name: words(ROOT / name) for name in listed.splitlines() if is_for_users(ROOT / name)}
    assert sum(counted.values()) <= USER_WORDS, sorted(counted.items(), key=lambda one: -one[1])[:10]
