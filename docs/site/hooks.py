"""What the site adds to the files under docs/: the READMEs of other folders as pages, and links between all of them.

On GitHub a link leads from a file to a file of the repository. On the site it leads to that file's page; a file
without a page is found under `repo_url` (of mkdocs.yml), or named without a link where that is not set.
"""

import posixpath
import re
from fnmatch import fnmatch
from pathlib import Path
from typing import Any

from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import File, Files
from mkdocs.structure.pages import Page

ROOT = Path(__file__).parents[2]
PAGES_ELSEWHERE = ("CONTRIBUTING.md", "CHANGELOG.md", "kernels/README.md", "docker/README.md", "recipes/*/README.md")
EXAMPLES = "examples/*/README.md"
START = ("README.md", "index.md")
"""The repository's README is the site's first page."""
LINK = re.compile(r"(?P<before>!?\[(?P<text>(?:[^\[\]]|\[[^\]]*\])*)\]\()(?P<to>[^)\s]+)(?P<after>\))")
ATTRIBUTE = re.compile(r'(?P<before>\b(?:src|srcset|href)=")(?P<to>[^"\s]+)(?P<after>")')
FENCE = re.compile(r"(^ *(`{3,}|~{3,}).*?^ *\2 *$)", re.MULTILINE | re.DOTALL)
NAV_SYMBOLS = frozenset("*?[")


def site_pages() -> dict[str, str]:
    """By the path in the repository, the path among the site's sources of every page that lies outside docs/."""
    found = [
        path.relative_to(ROOT).as_posix() for pattern in (*PAGES_ELSEWHERE, EXAMPLES) for path in ROOT.glob(pattern)
    ]
    return {START[0]: START[1], **{name: name for name in found}}


def on_files(files: Files, config: MkDocsConfig) -> Files:
    """Add the pages that lie outside docs/ and expand the patterns of the navigation."""
    for name, source in site_pages().items():
        files.append(File.generated(config, source, abs_src_path=str(ROOT / name)))
    sources = sorted(file.src_uri for file in files.documentation_pages())
    config.nav = expand(config.nav or [], sources)
    return files


def expand(entries: list[Any], sources: list[str]) -> list[Any]:
    """A navigation whose patterns are replaced by the pages that they find."""
    expanded: list[Any] = []
    for entry in entries:
        if isinstance(entry, dict):
            ((title, below),) = entry.items()
            expanded.append({title: expand(below, sources) if isinstance(below, list) else below})
        elif NAV_SYMBOLS.isdisjoint(entry):
            expanded.append(entry)
        else:
            # A pattern's star finds no folder's separator.
            expanded += [s for s in sources if fnmatch(s, entry) and s.count("/") == entry.count("/")]
    return expanded


def on_page_markdown(markdown: str, *, page: Page, config: MkDocsConfig, files: Files) -> str:
    """Turn links between files of the repository into links between pages."""
    home = repository_path(page.file.src_uri)

    def replaced(found: re.Match[str]) -> str:
        if re.match(r"[a-z]+:|#|/", found["to"]):
            return found[0]
        target, mark, anchor = found["to"].partition("#")
        path = posixpath.normpath(posixpath.join(posixpath.dirname(home), target))
        source = site_pages().get(path, path.removeprefix("docs/") if path.startswith("docs/") else None)
        if source is not None and files.get_file_from_path(source) is not None:
            to = posixpath.relpath(source, posixpath.dirname(page.file.src_uri) or ".")
            return f"{found['before']}{to}{mark}{anchor}{found['after']}"
        if config.repo_url:
            return f"{found['before']}{config.repo_url.rstrip('/')}/blob/main/{path}{found['after']}"
        return found.groupdict().get("text") or found[0]

    parts = FENCE.split(markdown)
    # Each fence comes with the characters that open it, by the pattern's second group.
    return "".join(
        part if index % 3 == 1 else ATTRIBUTE.sub(replaced, LINK.sub(replaced, part))
        for index, part in enumerate(parts)
        if index % 3 != 2
    )


def repository_path(source: str) -> str:
    """Where in the repository a page of the site lies."""
    if source == START[1]:
        return START[0]
    return source if source in site_pages() else f"docs/{source}"
