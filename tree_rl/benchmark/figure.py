"""The figures of the paper from rows of results: speed-up against overlap, and loss curves with their deviation."""

import io
from collections.abc import Mapping, Sequence
from pathlib import Path

import matplotlib

matplotlib.use("Agg")
import matplotlib.pyplot as plt

from tree_rl.inspection.files.writing import write_whole
from tree_rl.tree.report.counted import counted

TREE_COLOUR, BOUND_COLOUR, PACKED_COLOUR, DEVIATION_COLOUR = "#1f5fa8", "#777777", "#e0a060", "#b5532a"


def draw_speed_up(rows: Sequence[Mapping[str, object]], path: Path, *, over: str = "packed rows") -> None:
    """Write a PNG: speed-up of a whole update over the potential overlap ratio, beside both bounds.

    Rows are those of `tree-rl bench`, as measured or as a CSV holds them.
    """
    ordered = sorted(rows, key=lambda row: float(str(row["por"])))
    names = ("por", "speed_up", "speed_up_low", "speed_up_high", "token_bound", "flop_bound")
    por, speed, low, high, token_bound, flop_bound = (_column(ordered, name) for name in names)
    below = [max(0.0, s - at) for s, at in zip(speed, low, strict=True)]
    above = [max(0.0, at - s) for s, at in zip(speed, high, strict=True)]
    figure, axes = plt.subplots(figsize=(7, 4))
    axes.plot(por, token_bound, ":", color=BOUND_COLOUR, label="1 / (1 - POR)")
    axes.plot(por, flop_bound, "--", color=BOUND_COLOUR, label="FLOP bound")
    look = {"fmt": "o-", "color": TREE_COLOUR, "capsize": 3}
    axes.errorbar(por, speed, yerr=[below, above], label="measured, whole update", **look)
    axes.set_yscale("log", base=2)
    ticks = [1, 2, 4, 8, 16]
    axes.set_yticks(ticks, [f"{tick}x" for tick in ticks])
    axes.set(xlabel="potential overlap ratio", ylabel=f"speed-up over {over}", title=_title(rows))
    save_figure(figure, path)


def draw_deviation(rows: Sequence[Mapping[str, object]], path: Path) -> None:
    """Write a PNG: loss of trees and packed rows per step, and how far they deviate."""
    steps = _column(rows, "step")
    figure, (upper, lower) = plt.subplots(2, 1, figsize=(7, 6), sharex=True)
    upper.plot(steps, _column(rows, "loss_packed"), color=PACKED_COLOUR, linewidth=3, label="packed rows")
    upper.plot(steps, _column(rows, "loss_tree"), color=TREE_COLOUR, linewidth=1, label="tree")
    upper.set(ylabel="loss", title=_title(rows))
    for name, label, style in (
        ("loss_tree_to_packed", "loss, tree to packed", "-"),
        ("loss_reordered_to_packed", "loss, packed in another order to packed", "-."),
        ("loss_tree_to_exact", "loss, tree to exact", "--"),
        ("loss_packed_to_exact", "loss, packed to exact", ":"),
    ):
        lower.plot(steps, _column(rows, name), style, color=DEVIATION_COLOUR, label=label)
    lower.set_yscale("log")
    lower.set(xlabel="optimizer step", ylabel="relative deviation")
    save_figure(figure, path)


def _title(rows: Sequence[Mapping[str, object]]) -> str:
    return f"{rows[0]['model']}, {counted(int(str(rows[0]['layers'])), 'layer')}, {rows[0]['device']}"


def save_figure(figure: plt.Figure, path: Path) -> None:
    """Give every panel a grid and a legend, write the PNG and close the figure."""
    for axes in figure.axes:
        axes.grid(alpha=0.3)
        axes.legend(frameon=False)
    figure.tight_layout()
    image = io.BytesIO()
    figure.savefig(image, dpi=130, format="png")
    plt.close(figure)
    write_whole(path, image.getvalue())


def _column(rows: Sequence[Mapping[str, object]], name: str) -> list[float]:
    return [float(str(row[name])) for row in rows]
