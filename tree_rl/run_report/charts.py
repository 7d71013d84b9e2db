"""Charts of a report as SVG, drawn by matplotlib, for light and dark pages: text takes the page's colour."""

import io
from collections.abc import Sequence
from math import isfinite

from tree_rl.extras import require_modules

require_modules("the report", "matplotlib")

import matplotlib

matplotlib.use("Agg")

from matplotlib import pyplot
from matplotlib.axes import Axes
from matplotlib.ticker import MaxNLocator

from tree_rl.inspection.files.run_log import RunLog
from tree_rl.run_report.sections import BANDS, TIMES, VALIDATION, Section

COLOURS = ("#2f83d6", "#e8590c", "#2f9e44", "#ae3ec9", "#c98a00", "#0ca678", "#d6336c", "#5c7cfa", "#868e96", "#74b816",
           "#15aabf")  # fmt: skip
GREY, REST = "#8a94a0", "#b4bcc4"
STYLE = {
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.edgecolor": GREY,
    "xtick.color": GREY,
    "ytick.color": GREY,
    "xtick.labelcolor": "black",
    "ytick.labelcolor": "black",
    "grid.color": GREY,
    "grid.alpha": 0.25,
    "axes.grid": True,
    "font.size": 9.5,
    "svg.fonttype": "none",
    "svg.hashsalt": "tree_rl",
    "savefig.transparent": True,
}
SIZE = (3.8, 2.4)


def metrics_of(section: Section, runs: Sequence[RunLog]) -> list[tuple[str, str]]:
    """(metric, name in the legend) of the section's metrics that any run has."""
    if not section.prefix:
        return [(metric, name) for metric, name in section.lines if any(run.has(metric) for run in runs)]
    found = {name for run in runs for metrics in run.metrics for name, value in metrics.items() if value}
    names = sorted(name for name in found if name.startswith(section.prefix))
    return [(name, name.removeprefix(section.prefix).replace("_", " ")) for name in names]


def draw_section(section: Section, runs: Sequence[RunLog]) -> str | None:
    """Chart of a section, the first run solid, the second dashed; None if no run has any of its metrics."""
    metrics = metrics_of(section, runs)
    if not metrics:
        return None
    with pyplot.rc_context(STYLE):
        figure, axes = pyplot.subplots(figsize=SIZE)
        for run, dashes in zip(runs, ("-", "--"), strict=False):
            for (metric, name), colour in zip(metrics, COLOURS * 4, strict=False):
                values = [(step, value) for step, value in zip(run.steps, run.column(metric), strict=True)
                          if value is not None and (value > 0 or not section.is_log)]  # fmt: skip
                if values:
                    is_named = dashes == "--" and runs[0].has(metric)
                    axes.plot(*zip(*values, strict=True), color=colour, linestyle=dashes, markersize=2.5,
                              marker="o" if len(values) < 40 else "", label=None if is_named else name)  # fmt: skip
        names = dict(metrics)
        for band in BANDS:
            if band.over is None and band.metric in names and isfinite(band.high):
                shown = axes.get_ylim()
                said = f"normal: {names[band.metric]}" if len(names) > 1 else "normal"
                axes.axhspan(band.low, band.high, color=COLOURS[2], alpha=0.18, linewidth=0, label=said)
                axes.set_ylim(shown)
        if section.is_log and any(line.get_ydata().size for line in axes.lines):
            axes.set_yscale("log")
        return _finished(figure, axes)


def draw_times(run: RunLog) -> str | None:
    """Chart of the parts of each step's time, and of the validation after it; None without times."""
    parts = [(metric, name) for metric, name in TIMES if run.has(metric)]
    if not run.has("timing_s/step") or not parts:
        return None

    def seconds(timer: str) -> list[float]:
        return [value or 0.0 for value in run.column(timer)]

    bars = [(seconds(metric), name, colour) for (metric, name), colour in zip(parts, COLOURS, strict=False)]
    known = [sum(values) for values in zip(*(values for values, _, _ in bars), strict=True)]
    rest = [max(0.0, step - of_parts) for step, of_parts in zip(seconds("timing_s/step"), known, strict=True)]
    bars.append((rest, "the rest", REST))
    if run.has(VALIDATION):
        bars.append((seconds(VALIDATION), "validation", COLOURS[-1]))
    with pyplot.rc_context(STYLE):
        figure, axes = pyplot.subplots(figsize=SIZE)
        below = [0.0] * len(run.steps)
        edges = [*(step - 0.5 for step in run.steps), run.steps[-1] + 0.5]
        for values, name, colour in bars:
            # One outline a part: a bar for each of thousands of steps would take minutes to draw.
            above = [low + value for low, value in zip(below, values, strict=True)]
            axes.stairs(above, edges, baseline=below, fill=True, color=colour, label=name)
            below = above
        axes.set_ylabel("seconds")
        return _finished(figure, axes)


def _finished(figure: "pyplot.Figure", axes: Axes) -> str:
    axes.set_xlabel("step")
    axes.xaxis.set_major_locator(MaxNLocator(integer=True, min_n_ticks=1))
    below = {"loc": "upper center", "bbox_to_anchor": (0.5, -0.22), "ncols": 2, "handlelength": 1.2, "columnspacing": 1}
    axes.legend(frameon=False, fontsize=9, **below)
    file = io.StringIO()
    figure.savefig(file, format="svg", metadata={"Date": None}, bbox_inches="tight", pad_inches=0.03)
    pyplot.close(figure)
    text = file.getvalue()
    return text[text.index("<svg") :]
