"""One self-contained page: data, script, style and D3's parts in one file, nothing from elsewhere."""

import json
from collections.abc import Mapping
from importlib.resources import files
from typing import Any

STATIC = files("tree_rl.viewer") / "static"


def build_page(data: Mapping[str, Any]) -> str:
    """The page as HTML.

    Args:
        data: title, groups and figures, as `view.js` reads them. Its texts may hold anything.
    """
    text = json.dumps(data, ensure_ascii=True, separators=(",", ":"), allow_nan=False).replace("<", "\\u003c")
    page = (STATIC / "page.html").read_text(encoding="utf-8")
    parts = {name: (STATIC / name).read_text(encoding="utf-8") for name in ("view.css", "d3-parts.min.js", "view.js")}
    for name, part in {**parts, "data": text}.items():
        before, after = page.split(f"/*{name}*/")
        page = before + part + after
    return page
