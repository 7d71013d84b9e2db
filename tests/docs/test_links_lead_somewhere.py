"""Links inside the repository: the file exists, and so does the heading that an anchor names, as GitHub names it.

So do the public names of the page about the code.
"""

import pkgutil
import re
from functools import cache
from pathlib import Path

import pytest
from shell_blocks import DOCUMENTS, FENCE, ROOT

LINK = re.compile(r'\]\((?!\w+:)([^)\s]+)\)|\b(?:src|srcset|href)="(?!\w+:)([^"\s]+)"')


@cache
def prose(path: Path) -> str:
    return re.sub(r"(?m)^( *)```.*?^\1```", "", FENCE.sub("", path.read_text(encoding="utf-8")), flags=re.DOTALL)


@cache
def anchors(path: Path) -> frozenset[str]:
    """Of the headings of a document; the second of two equal headings ends in -1."""
    found: dict[str, int] = {}
    for heading in re.findall(r"(?m)^#{1,6} +(.*?) *#*$", prose(path)):
        text = re.sub(r"!?\[([^\]]*)\]\([^)]*\)", r"\1", heading).replace("`", "").lower()
        slug = re.sub(r"[^\w\- ]", "", text).replace(" ", "-")
        found[slug] = found.get(slug, -1) + 1
    repeated = {f"{slug}-{number}" for slug, most in found.items() for number in range(1, most + 1)}
    return frozenset(found) | repeated


@pytest.mark.parametrize("document", DOCUMENTS, ids=lambda path: f"{path.parent.name}-{path.name}")
def test_links_lead_to_files_and_headings(document: Path) -> None:
    for in_markdown, in_html in LINK.findall(prose(document)):
        target, _, anchor = (in_markdown or in_html).partition("#")
        path = (document.parent / target).resolve() if target else document
        assert path.exists(), f"{document.name}: {target}"
        if anchor and path.suffix == ".md":
            assert anchor in anchors(path), f"{document.name}: {target}#{anchor}"


def test_headings_are_named_as_github_names_them(tmp_path: Path) -> None:
    page = tmp_path / "page.md"
    page.write_text("# A `key`: [one](two.md), & 3!\n```bash\n# no heading\n```\n## Twice\n## Twice\n### a-b_c\n")
    assert anchors(page) == {"a-key-one--3", "twice", "twice-1", "a-b_c"}


PAGE = (ROOT / "docs" / "code.md").read_text(encoding="utf-8").split("## Public names")[1]


@pytest.mark.parametrize("name", re.findall(r"`((?:tree_rl|tree_kernels)\.[\w.]+)`", PAGE))
def test_a_public_name_is_importable(name: str) -> None:
    pkgutil.resolve_name(name)
