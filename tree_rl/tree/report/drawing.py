"""Drawings of a forest: ``draw_text`` for a terminal, ``draw_svg`` for a page. Both are pure functions."""

from tree_rl.tree.report.drawing_svg import draw_svg
from tree_rl.tree.report.drawing_text import draw_text

__all__ = ["draw_svg", "draw_text"]
