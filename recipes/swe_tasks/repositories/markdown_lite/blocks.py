"""Headings, lists and paragraphs."""

import re

from inline import render_inline


def render(text):
    parts = []
    for block in re.split(r"\n\s*\n", text.strip()):
        lines = block.splitlines()
        heading = re.fullmatch(r"(#{1,6}) (.*)", lines[0]) if lines else None
        if heading and len(lines) == 1:
            level = len(heading[1])
            parts.append(f"<h{level}>{render_inline(heading[2])}</h{level}>")
        elif lines and all(line.startswith("- ") for line in lines):
            items = "".join(f"<li>{render_inline(line[2:])}</li>" for line in lines)
            parts.append(f"<ul>{items}</ul>")
        elif lines:
            parts.append(f"<p>{render_inline(' '.join(lines))}</p>")
    return "\n".join(parts)
