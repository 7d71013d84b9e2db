"""Draws a forest as text: one line per segment, children below their parent, heaviest first."""

from collections.abc import Callable, Sequence

from tree_rl.tree.forest import Forest
from tree_rl.tree.report.counted import counted
from tree_rl.tree.report.heaviest_part import Shown, caption, choose_shown

LABEL_TOKENS = 32
"""Most tokens of a segment that are decoded for its label."""


def draw_text(
    forest: Forest,
    *,
    max_segments: int = 60,
    max_level: int = 24,
    decode: Callable[[Sequence[int]], str] | None = None,
    label_width: int = 48,
) -> str:
    """Draw a forest with box characters.

    Each line has a segment's token count and its path count (``x3``: three rows pass through it); ``end 1`` counts the
    rows that end where others go on.

    Args:
        forest: the rows.
        max_segments: most segments to draw, the heaviest first; the others are only counted.
        max_level: deepest level to draw.
        decode: turns token ids into text; labels each segment with its first tokens.
        label_width: most characters of a label.

    Returns:
        Lines without a final newline.
    """
    shown = choose_shown(forest, max_segments=max_segments, max_level=max_level)
    lines = [caption(forest)]
    children: dict[int, list[int]] = {}
    for segment in shown.segments.tolist():
        children.setdefault(int(forest.segments.parent[segment]), []).append(segment)
    # Stack, last child first. An entry -s - 1 stands for the hidden branches below segment s.
    waiting = [(root, "", "") for root in reversed(children.get(-1, []))]
    while waiting:
        segment, indent, branch = waiting.pop()
        if segment < 0:
            parent = -segment - 1
            hidden, tokens = shown.hidden_branches[parent], shown.hidden_tokens[parent]
            lines.append(f"{indent}{branch}… {hidden:,} more, {counted(tokens, 'token')}")
            continue
        lines.append(f"{indent}{branch}{_describe(forest, shown, segment, decode, label_width)}")
        below = children.get(segment, []) + ([-segment - 1] if shown.hidden_branches[segment] else [])
        inner = indent + {"": "", "├─ ": "│  ", "└─ ": "   "}[branch]
        marks = ["├─ "] * (len(below) - 1) + ["└─ "]
        waiting += [
            (child, inner, mark) for child, mark in zip(reversed(below), reversed(marks[: len(below)]), strict=True)
        ]
    if shown.hidden_roots:
        lines.append(f"… {counted(shown.hidden_roots, 'more tree')}")
    return "\n".join(lines)


def _describe(
    forest: Forest, shown: Shown, segment: int, decode: Callable[[Sequence[int]], str] | None, label_width: int
) -> str:
    start, end = int(forest.segments.start[segment]), int(forest.segments.end[segment])
    words = [f"{end - start:,}", f"x{forest.segments.path_count[segment]:,}"]
    goes_on = forest.segments.subtree_end[segment] > end
    if goes_on and shown.rows_that_end[segment]:
        words.append(f"end {shown.rows_that_end[segment]:,}")
    if decode is not None:
        words.append(_label(decode(forest.input_ids[start : min(end, start + LABEL_TOKENS)].tolist()), label_width))
    return " ".join(words)


def _label(text: str, width: int) -> str:
    """Quoted text on one line, truncated to a width."""
    line = text.replace("\n", "⏎").replace("\t", "⇥")
    line = "".join(character if character.isprintable() else "�" for character in line)
    return f"“{line}”" if len(line) <= width else f"“{line[: width - 1]}…”"
