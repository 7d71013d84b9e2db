"""The site is built without a warning and without the network, and has a page for every document."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
from shell_blocks import ROOT

pytest.importorskip(
    "material", reason='the extra docs is not installed: pip install -c constraints/cpu.txt -e ".[docs]"'
)

pytestmark = pytest.mark.slow
LOADED = re.compile(
    r'<(?:script|link|img|iframe|source|object)\b[^>]*?\b(?:src|href|srcset|data)="?(?:https?:)?//[^">\s]+'
)
"""What a browser fetches from another host when it shows a page; links that a reader clicks are none."""


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("site")
    # A proxy that does not exist: whatever asked the network would fail.
    shell = os.environ | dict.fromkeys(("https_proxy", "http_proxy"), "http://127.0.0.1:9")
    command = [sys.executable, "-m", "mkdocs", "build", "--strict", "--quiet", "--site-dir", str(folder)]
    shell["NO_MKDOCS_2_WARNING"] = "1"
    done = subprocess.run(command, cwd=ROOT, env=shell, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-3000:]
    return folder


def test_every_document_is_a_page(site: Path) -> None:
    documents = [path.relative_to(ROOT / "docs") for path in (ROOT / "docs").rglob("*.md")]
    pages = [path.parent / ("index.html" if path.stem == "README" else f"{path.stem}.html") for path in documents]
    assert not [page for page in pages if not (site / page).exists()]
    assert (site / "recipes" / "grpo" / "index.html").exists() and (site / "kernels" / "index.html").exists()


def test_no_page_loads_anything_from_another_host(site: Path) -> None:
    found = {hit for page in site.rglob("*.html") for hit in LOADED.findall(page.read_text(encoding="utf-8"))}
    assert not found


def test_links_between_folders_lead_to_pages(site: Path) -> None:
    start = (site / "index.html").read_text(encoding="utf-8")
    assert 'href="configuration.html"' in start and 'href="recipes/grpo/index.html"' in start
    assert not re.search(r'href="[^":]*\.md[#"]', start)
