"""The figures of the paper from rows of results: speed-up against overlap, and loss curves with their deviation."""

from collections.abc import Mapping, Sequence
from pathlib import Path

import matplotlib

matplotlib.use("Agg")
import matplotlib.pyplot as plt

TREE_COLOUR, BOUND_COLOUR, PACKED_COLOUR, DEVIATION_COLOUR = "#1f5fa8", "#777777", "#e0a060", "#b5532a"

Columns = Mapping[str, object]


def draw_speed_up(rows: Sequence[Columns], path: Path, *, title: str, over: str = "packed rows") -> None:
    """Speed-up of a whole update over the potential overlap ratio, beside both bounds.

    Args:
        rows: rows of `Comparison.row`.
        path: PNG to write.
        title: says model and device.
        over: what is sped up.
    """
    ordered = sorted(rows, key=lambda row: _number(row, "por"))
    por = [_number(row, "por") for row in ordered]
    speed, low, high = (
        [_number(row, name) for row in ordered] for name in ("speed_up", "speed_up_low", "speed_up_high")
    )
    figure, axes = plt.subplots(figsize=(7, 4))
    axes.plot(por, [_number(row, "token_bound") for row in ordered], ":", color=BOUND_COLOUR, label="1 / (1 - POR)")
    axes.plot(por, [_number(row, "flop_bound") for row in ordered], "--", color=BOUND_COLOUR, label="FLOP bound")
    ranges = [[s - at for s, at in zip(speed, low, strict=True)], [at - s for s, at in zip(speed, high, strict=True)]]
    ranges = [[max(0.0, value) for value in side] for side in ranges]
    axes.errorbar(por, speed, yerr=ranges, fmt="o-", color=TREE_COLOUR, capsize=3, label="measured, whole update")
    axes.set_yscale("log", base=2)
    ticks = [1, 2, 4, 8, 16]
    axes.set_yticks(ticks, [f"{tick}x" for tick in ticks])
    axes.set_xlabel("potential overlap ratio")
    axes.set_ylabel(f"speed-up over {over}")
    _finish(figure, axes, path, title)


def draw_deviation(curves: Sequence[Columns], path: Path, *, title: str) -> None:
    """Loss of trees and packed rows per step, and the relative deviation of loss and gradient."""
    steps = [_number(row, "step") for row in curves]
    figure, (upper, lower) = plt.subplots(2, 1, figsize=(7, 6), sharex=True)
    upper.plot(
        steps, [_number(row, "loss_packed") for row in curves], color=PACKED_COLOUR, linewidth=3, label="packed rows"
    )
    upper.plot(steps, [_number(row, "loss_tree") for row in curves], color=TREE_COLOUR, linewidth=1, label="tree")
    upper.set_ylabel("loss")
    upper.legend(frameon=False)
    upper.grid(alpha=0.3)
    for name, label, style in (
        ("loss_tree_to_packed", "loss, tree to packed", "-"),
        ("loss_reordered_to_packed", "loss, packed in another order to packed", "-."),
        ("loss_tree_to_exact", "loss, tree to exact", "--"),
        ("loss_packed_to_exact", "loss, packed to exact", ":"),
    ):
        lower.plot(steps, [_number(row, name) for row in curves], style, color=DEVIATION_COLOUR, label=label)
    lower.set_yscale("log")
    lower.set_xlabel("optimizer step")
    lower.set_ylabel("relative deviation")
    upper.set_title(title)
    _finish(figure, lower, path, "")


def _finish(figure: plt.Figure, axes: plt.Axes, path: Path, title: str) -> None:
    if title:
        axes.set_title(title)
    axes.grid(alpha=0.3)
    axes.legend(frameon=False)
    figure.tight_layout()
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=130)
    plt.close(figure)


def _number(row: Columns, name: str) -> float:
    return float(str(row[name]))
