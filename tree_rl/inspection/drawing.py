"""Draws one group of rows."""

from enum import StrEnum
from pathlib import Path

from tree_rl.inspection.chat_tokenizer import ChatTokenizer
from tree_rl.inspection.files import RowFileError
from tree_rl.inspection.files.quoting import quoted, quoted_names
from tree_rl.inspection.overlap_by_group import forest_of, rows_by_group
from tree_rl.inspection.row import Row
from tree_rl.tree import draw_svg, draw_text


class Picture(StrEnum):
    """How a tree is drawn: as lines for a terminal, or as an SVG file."""

    TEXT = "text"
    SVG = "svg"


def draw_group(rows: list[Row], name: str | None, picture: Picture, tokenizer: Path | None, width: int) -> str:
    """Draw the forest of one group, None for the one with the most tokens, and return the drawing as text.

    A text has the segments that the `tokenizer` decodes, or only their lengths; an SVG has `width` pixels. Raises a
    RowFileError if there is no such group.
    """
    groups = rows_by_group(row.group for row in rows)
    if name is not None and name not in groups:
        known = quoted_names(groups)
        raise RowFileError(f"--draw-group {quoted(name)}: no such group; the file has {len(groups)}: {known}")
    tokens = {group: sum(len(rows[index].token_ids) for index in members) for group, members in groups.items()}
    chosen = max(groups, key=tokens.__getitem__) if name is None else name
    forest = forest_of([rows[index] for index in groups[chosen]])
    if picture is Picture.SVG:
        return draw_svg(forest, width=width, title=f"Group {quoted(chosen)}")
    decode = None if tokenizer is None else ChatTokenizer(tokenizer).decode
    return f"Group {quoted(chosen)}: " + draw_text(forest, decode=decode)
