"""The report's figures: reward, tokens, update time, and a real trajectory tree."""

from pathlib import Path

import matplotlib

matplotlib.use("Agg")

import numpy as np
from matplotlib import pyplot
from matplotlib.axes import Axes
from quickstart.summary import EDGE_STEPS, Summary

from tree_rl.tree import Forest

INK, PALE, ACCENT, SHADE = "#1f2933", "#9aa5b1", "#2563a8", "#d9e6f2"
STYLE = {
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.edgecolor": PALE,
    "axes.labelcolor": INK,
    "axes.titlelocation": "left",
    "axes.titlesize": 12,
    "axes.titleweight": "bold",
    "text.color": INK,
    "xtick.color": INK,
    "ytick.color": INK,
    "font.size": 10,
    "svg.fonttype": "none",
}


def draw_report(summary: Summary, first: Forest, last: Forest, path: Path) -> None:
    """Draw all figures on one page.

    Args:
        summary: The run.
        first: Rows of one task at the first step.
        last: The same at the last step.
        path: A png or svg file.
    """
    with pyplot.rc_context(STYLE):
        figure = pyplot.figure(figsize=(14, 10), layout="constrained")
        grid = figure.add_gridspec(2, 6, height_ratios=(1, 1.5))
        draw_reward(figure.add_subplot(grid[0, :2]), summary)
        draw_tokens(figure.add_subplot(grid[0, 2:4]), summary)
        draw_times(figure.add_subplot(grid[0, 4:]), summary)
        draw_tree(figure.add_subplot(grid[1, :3]), first, "One task at step 1")
        draw_tree(figure.add_subplot(grid[1, 3:]), last, f"One task at step {len(summary.reward)}")
        figure.savefig(path, dpi=130)
        pyplot.close(figure)


def draw_reward(axes: Axes, summary: Summary) -> None:
    """Reward by step, with the means of the first and last steps."""
    steps = np.arange(1, len(summary.reward) + 1)
    for span, value in (
        (steps[:EDGE_STEPS], summary.first_reward),
        (steps[-EDGE_STEPS:], summary.last_reward),
    ):
        axes.axvspan(span[0] - 0.5, span[-1] + 0.5, color=SHADE, linewidth=0)
        axes.annotate(f"{value:.2f}", (span.mean(), 0.03), ha="center", color=ACCENT, weight="bold")
    axes.plot(steps, summary.reward, color=ACCENT, marker="o", markersize=3.5, linewidth=1.6)
    axes.set(
        title="Reward (shaded: mean of five steps)", xlabel="GRPO step", ylim=(0, 1.02), xlim=(0.5, len(steps) + 0.5)
    )


def draw_tokens(axes: Axes, summary: Summary) -> None:
    """Flat and unique tokens by step."""
    steps = np.arange(1, len(summary.reward) + 1)
    axes.bar(steps, summary.flat_tokens / 1e3, color=SHADE, width=0.85, label="rows (flat tokens)")
    axes.bar(steps, summary.unique_tokens / 1e3, color=ACCENT, width=0.85, label="trees (unique tokens)")
    axes.set(title=f"Tokens of an update: {summary.overall_por:.0%} saved", xlabel="GRPO step", ylabel="thousand")
    axes.set_ylim(0, summary.flat_tokens.max() / 1e3 * 1.28)
    axes.legend(frameon=False, loc="upper left", fontsize=9)


def draw_times(axes: Axes, summary: Summary) -> None:
    """Every measured update of the replayed batch, and the medians."""
    for place, (timing, color) in enumerate(((summary.flat, PALE), (summary.tree, ACCENT))):
        axes.barh(place, timing.median, color=color, height=0.55)
        axes.plot(timing.seconds, [place] * len(timing.seconds), "|", color=INK, markersize=12)
        axes.annotate(
            f"{timing.median:.2f} s",
            (max(timing.seconds), place),
            xytext=(7, 0),
            textcoords="offset points",
            va="center",
            weight="bold",
        )
    axes.set_yticks([0, 1], ["rows", "trees"])
    axes.invert_yaxis()
    axes.set_xlim(0, max(summary.flat.seconds) * 1.28)
    speed_up = summary.flat.median / summary.tree.median
    axes.set(
        title=f"Time of an update: {speed_up:.1f} x faster", xlabel=f"seconds, the same {summary.replay_rows} rows"
    )


def draw_tree(axes: Axes, forest: Forest, name: str) -> None:
    """A forest: x is the token position, a bar a segment, darker with more rows through it."""
    segments = forest.segments
    lanes = _lanes(forest)
    most = max(int(segments.path_count.max()), 2)
    color = matplotlib.colormaps["Blues"]
    for segment in range(len(segments)):
        start, length = int(segments.depth[segment]), int(segments.end[segment] - segments.start[segment])
        parent = int(segments.parent[segment])
        if parent >= 0 and lanes[parent] != lanes[segment]:
            axes.plot([start, start], [lanes[parent], lanes[segment]], color=PALE, linewidth=0.8, zorder=1)
        shade = 0.25 + 0.7 * np.log(int(segments.path_count[segment])) / np.log(most)
        axes.barh(lanes[segment], length, left=start, height=0.72, color=color(shade), edgecolor="white", linewidth=0.5)
        if int(segments.path_count[segment]) > 1 and length > 6:
            ink = "white" if shade > 0.55 else INK
            axes.annotate(
                str(int(segments.path_count[segment])),
                (start + length / 2, lanes[segment]),
                ha="center",
                va="center",
                color=ink,
                fontsize=8,
            )
    title = f"{name}: {forest.num_rows} rows, {forest.num_flat:,} tokens, {forest.num_unique:,} unique"
    axes.set(
        title=title, xlabel="token position (numbers: rows through a segment)", yticks=[], ylim=(max(lanes) + 1, -1)
    )
    axes.spines["left"].set_visible(False)


def _lanes(forest: Forest) -> list[int]:
    """A line for every segment: the heaviest child stays on its parent's, every other child opens a new one."""
    lanes: list[int] = []
    continued: set[int] = set()
    last = -1
    for parent in forest.segments.parent.tolist():
        if parent >= 0 and parent not in continued:
            continued.add(parent)
            lanes.append(lanes[parent])
            continue
        last += 1
        lanes.append(last)
    return lanes
