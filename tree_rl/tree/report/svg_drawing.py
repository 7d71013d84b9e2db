"""Draws a forest as a self-contained SVG: a bar is a segment, x the token position, the colour the path count g.

The heaviest child continues on its parent's line; the other children get lines below.
"""

from html import escape
from math import ceil, floor, log10
from textwrap import wrap

import numpy as np

from tree_rl.tree.forest import Forest
from tree_rl.tree.report.counted import counted
from tree_rl.tree.report.heaviest_part import Shown, caption, choose_shown

LANE, BAR, MARGIN, TOP, TREE_GAP = 20.0, 13.0, 28.0, 76.0, 10.0
NARROW, NOTE_LINE, LEGEND = 640, 16.0, 30.0
"""Pixels: the width below which the legend has a line of its own, a line of the caption, the legend's line."""
FEW, MANY = (158, 202, 225), (8, 48, 107)
INK, PALE, GRID = "#1f2933", "#5f6c7b", "#e8ecf0"
STYLE = "font-family:system-ui,-apple-system,Segoe UI,Helvetica,Arial,sans-serif"
DARK = "@media (prefers-color-scheme:dark){.prefix-forest{filter:invert(.92) hue-rotate(180deg)}}"
"""Light turns into dark, hues stay: every contrast of the drawing holds in dark mode too."""


def draw_svg(
    forest: Forest,
    *,
    width: int = 960,
    max_segments: int = 400,
    title: str | None = None,
    note: str | None = None,
) -> str:
    """Draw a forest.

    Args:
        forest: the rows.
        width: pixels; the height follows from the number of leaves.
        max_segments: most segments to draw, the heaviest first. ``+n`` marks a segment none of whose n branches is
            drawn; tooltips count all branches that are not drawn.
        title: first line; None writes "Prefix forest".
        note: second line; None writes the forest's statistics.

    Returns:
        An ``<svg>`` element with a white background, dark in dark mode, without scripts or external references.

    Raises:
        ValueError: the width is too small for the margins.
    """
    if width < 200:
        raise ValueError(f"width: expected at least 200 pixels, received {width}")
    shown = choose_shown(forest, max_segments=max_segments)
    segments = forest.segments
    caption_lines = wrap(note or caption(forest), int((width - 2 * MARGIN) / 6.6))
    legend_top = 40 + NOTE_LINE * len(caption_lines) if width < NARROW else 14.0
    top = TOP + NOTE_LINE * (len(caption_lines) - 1) + (LEGEND if width < NARROW else 0)
    y = _lines(forest, shown, top)
    depth_tokens = int((segments.depth + segments.lengths)[shown.segments].max(initial=1))
    scale = (width - 2 * MARGIN - 24) / depth_tokens
    bottom = max(y.values(), default=top) + LANE
    height = bottom + 26
    most = int(forest.path_count.max()) if forest.num_unique else 1
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{width}" height="{height:.0f}" '
        f'viewBox="0 0 {width} {height:.0f}" style="{STYLE}" class="prefix-forest" role="img">',
        f"<style>{DARK}</style>",
        f'<rect width="{width}" height="{height:.0f}" fill="#ffffff"/>',
        _note(MARGIN, 24, title or "Prefix forest", size=15, ink=INK),
        *(_note(MARGIN, 43 + NOTE_LINE * number, line, size=12) for number, line in enumerate(caption_lines)),
        *_legend(width, legend_top, most),
        *_axis(depth_tokens, scale, top, bottom, most_labels=width // 110),
    ]
    parts += [_connector(forest, segment, y, scale, most) for segment in y]
    parts += [_bar(forest, shown, segment, y[segment], scale, most) for segment in y]
    if shown.hidden_roots:
        parts.append(_note(MARGIN, bottom + 20, f"+{counted(shown.hidden_roots, 'tree')} not drawn"))
    return "\n".join([part for part in parts if part] + ["</svg>"])


def _lines(forest: Forest, shown: Shown, top: float) -> dict[int, float]:
    """y of each shown segment: the heaviest child stays on its parent's line, every other child opens a new line."""
    y: dict[int, float] = {}
    continued: set[int] = set()
    line = top - LANE - TREE_GAP
    for segment in shown.segments.tolist():
        parent = int(forest.segments.parent[segment])
        if parent >= 0 and parent not in continued:
            continued.add(parent)
            y[segment] = y[parent]
            continue
        line += LANE if parent >= 0 else LANE + TREE_GAP
        y[segment] = line
    return y


def _bar(forest: Forest, shown: Shown, segment: int, y: float, scale: float, most: int) -> str:
    segments = forest.segments
    depth, tokens = int(segments.depth[segment]), int(segments.end[segment] - segments.start[segment])
    count = int(segments.path_count[segment])
    x, size = MARGIN + depth * scale, max(1.5, tokens * scale - 1)
    branches, left_out = int(shown.hidden_branches[segment]), int(shown.hidden_tokens[segment])
    hidden = f"{counted(branches, 'branch')}, {counted(left_out, 'token')} not drawn"
    where = f"position {depth:,}" if tokens == 1 else f"positions {depth:,} to {depth + tokens - 1:,}"
    tip = f"{counted(tokens, 'token')} at {where}, {counted(count, 'row')}"
    tip += f"; {hidden}" if branches else ""
    bar = (
        f'<rect x="{x:.1f}" y="{y:.1f}" width="{size:.1f}" height="{BAR}" rx="{min(3.0, size / 4):.1f}" '
        f'fill="{_colour(count, most)}"><title>{tip}</title></rect>'
    )
    words = f"{tokens:,} ×{count:,}" if count > 1 else f"{tokens:,}"
    if size > 6 * len(words) + 8:
        ink = "#ffffff" if _share(count, most) > 0.45 else INK
        bar += _note(x + 5, y + BAR - 3.3, words, size=9.5, ink=ink)
    right = x + size
    if segments.subtree_end[segment] > segments.end[segment] and shown.rows_that_end[segment]:
        bar += (
            f'<circle cx="{right - 1:.1f}" cy="{y + BAR / 2}" r="3" fill="#ffffff" stroke="#d9480f" stroke-width="1.5">'
            f"<title>end of {counted(int(shown.rows_that_end[segment]), 'row')}</title></circle>"
        )
    if branches and not shown.shown_branches[segment]:
        bar += _note(right + 3, y + BAR - 3, f"+{branches:,}", hidden)
    return bar


def _connector(forest: Forest, segment: int, y: dict[int, float], scale: float, most: int) -> str:
    """The curve from a parent's end down to a child on another line."""
    parent = int(forest.segments.parent[segment])
    if parent < 0 or y[parent] == y[segment]:
        return ""
    x = MARGIN + int(forest.segments.depth[segment]) * scale
    top, bottom = y[parent] + BAR, y[segment] + BAR / 2
    colour = _colour(int(forest.segments.path_count[segment]), most)
    path = f"M{x - 2.5:.1f} {top - 2:.1f} V{bottom - 4:.1f} Q{x - 2.5:.1f} {bottom:.1f} {x + 1:.1f} {bottom:.1f}"
    return f'<path d="{path}" fill="none" stroke="{colour}" stroke-width="1.4"/>'


def _axis(depth_tokens: int, scale: float, top: float, bottom: float, *, most_labels: int) -> list[str]:
    parts = []
    step = _round_step(depth_tokens / most_labels)
    for position in range(0, depth_tokens + 1, step):
        x = MARGIN + position * scale
        parts.append(f'<line x1="{x:.1f}" y1="{top - 8}" x2="{x:.1f}" y2="{bottom:.1f}" stroke="{GRID}"/>')
        parts.append(_note(x, top - 12, f"{position:,}", anchor="middle" if position else "start"))
    return parts


def _legend(width: int, top: float, most: int) -> list[str]:
    counts = sorted({max(1, round(most ** (step / 4))) for step in range(5)})
    x = width - MARGIN - 30.0 * len(counts)
    parts = [_note(x - 6, top + 11, "rows through a segment", anchor="end")]
    for number, count in enumerate(counts):
        left = x + 30 * number
        parts.append(f'<rect x="{left:.1f}" y="{top:.0f}" width="28" height="9" rx="2" fill="{_colour(count, most)}"/>')
        parts.append(_note(left + 14, top + 21, f"{count:,}", anchor="middle"))
    return parts


def _note(
    x: float, y: float, text: str, tip: str = "", *, anchor: str = "start", size: float = 10, ink: str = PALE
) -> str:
    inner = f"<title>{escape(tip)}</title>" if tip else ""
    place = f'x="{x:.1f}" y="{y:.1f}" font-size="{size}" fill="{ink}" text-anchor="{anchor}"'
    return f"<text {place}>{inner}{escape(text)}</text>"


def _round_step(size: float) -> int:
    """The smallest of 1, 2, 5 times a power of ten that is at least ``size``."""
    power = 10 ** max(0, floor(log10(max(size, 1))))
    return int(next(power * factor for factor in (1, 2, 5, 10) if power * factor >= ceil(size)))


def _share(count: int, most: int) -> float:
    return float(np.log(count) / np.log(most)) if most > 1 else 0.0


def _colour(count: int, most: int) -> str:
    mix = [few + (many - few) * _share(count, most) for few, many in zip(FEW, MANY, strict=True)]
    return "#" + "".join(f"{round(channel):02x}" for channel in mix)
