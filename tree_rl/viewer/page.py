"""One self-contained HTML file: data, scripts and d3-zoom. Text of rows never becomes markup."""

import base64
import gzip
import html
import json
from dataclasses import asdict
from importlib.resources import files
from typing import Any

from tree_rl.inspection.overlap_by_group import rows_by_group
from tree_rl.inspection.row import Row
from tree_rl.viewer.roles import ROLES, RoleReader
from tree_rl.viewer.tree_data import MEASURES, group_data

STATIC = files("tree_rl.viewer") / "static"
LIBRARY = ("dispatch", "selection", "timer", "color", "interpolate", "ease", "transition", "drag", "zoom")
"""d3's modules, in the order of their dependencies."""
SCRIPTS = ("text.js", "layout.js", "colours.js", "drawing.js", "panels.js", "viewer.js")


def view_data(rows: list[Row], roles: RoleReader, *, source: str, max_tokens: int | None = None) -> dict[str, Any]:
    """Data of the page: groups sorted by POR, highest first, and the measures that it can colour by.

    `source` becomes the title; `max_tokens` is the token budget of a forward, None plans no partitions.
    """
    members = rows_by_group(row.group for row in rows)
    groups = [group_data([rows[index] for index in chosen], roles, max_tokens) for chosen in members.values()]
    return {
        "source": source,
        "roles": ROLES,
        "measures": [asdict(measure) for measure in MEASURES],
        "groups": sorted(groups, key=lambda group: -group["por"]),
    }


def write_page(data: dict[str, Any]) -> bytes:
    """The page as UTF-8; equal data give equal bytes.

    The data are base64 of gzip, so no text of a row can end a script or be parsed as markup.
    """
    packed = gzip.compress(json.dumps(data, separators=(",", ":")).encode("ascii"), compresslevel=6, mtime=0)
    library = [_static(f"d3/d3-{name}.min.js") for name in LIBRARY]
    parts = {
        "style": _static("viewer.css"),
        "library": "\n".join(library),
        "script": "\n".join(_static(name) for name in SCRIPTS),
        "data": base64.b64encode(packed).decode("ascii"),
        # Last, because a file's name may contain one of the placeholders above.
        "title": html.escape(data["source"]),
    }
    page = _static("page.html")
    for name, part in parts.items():
        page = page.replace("{{" + name + "}}", part, 1)
    return page.encode("utf-8", "backslashreplace")


def _static(name: str) -> str:
    return (STATIC / name).read_text(encoding="utf-8")
