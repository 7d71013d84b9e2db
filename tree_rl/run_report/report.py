"""Summarises a run, as rows of a table and as one self-contained page."""

from collections.abc import Iterator, Sequence
from html import escape

from tree_rl.inspection.files.run_log import RunLog
from tree_rl.inspection.verdict.update_share import SHORTENED, STEP
from tree_rl.run_report.page_style import page
from tree_rl.run_report.sections import BANDS, MEMORY, SECTIONS, TIMES
from tree_rl.tree.report.counted import counted

EDGE = 5
"""Number of steps whose mean represents the beginning or the end of a run."""
UNUSUAL = ", unusual"
REWARDS = ("tree/session_score/mean", "critic/score/mean")


def summary_rows(run: RunLog) -> Iterator[tuple[str, str]]:
    """(name, value) of the main results that the run's log has."""
    restarts = f", restarts: {run.restarts}" if run.restarts else ""
    yield "steps", f"{len(run.steps)} (last: {run.steps[-1]}){restarts}"
    reward = next((name for name in REWARDS if run.has(name)), None)
    if reward is not None:
        values = [value for value in run.column(reward) if value is not None]
        edge = EDGE if len(values) > EDGE else 1
        first, last = (sum(part) / edge for part in (values[:edge], values[-edge:]))
        name = f"mean reward, first and last {edge} steps" if edge > 1 else "reward, first and last step"
        yield name, f"{first:z.3f}, {last:z.3f}"
    if (por := run.mean("tree/por")) is not None:
        yield "POR (share of the rows' tokens that repeat a prefix)", f"{por:.3f}"
    flat, unique = run.mean("tree/flat_tokens"), run.mean("tree/unique_tokens")
    if flat is not None and unique is not None:
        yield "tokens of a step: of all rows, of their trees", f"{flat:,.0f}, {unique:,.0f}"
    if flat and unique:
        yield "token bound of updates (most that trees can give)", f"{flat / unique:.2f} times"
    if (reached := saved_speed_up(run)) is not None:
        yield "by the tokens that updates left out", f"{reached:.2f} times"
    if (gained := gained_step(run)) is not None:
        yield "gain of a whole step, estimated by tokens", gained
    if step := run.mean(STEP):
        yield "seconds of a step", f"{step:.2f}"
        share = [(_seconds(run, metric), name) for metric, name in TIMES]
        longest = ", ".join(f"{name} {part / step:.0%}" for part, name in sorted(share, reverse=True)[:3] if part)
        yield "most of it", longest or "not logged"
    if memory := [peak for name in MEMORY for peak in run.column(name) if peak is not None]:
        yield "most memory", f"{max(memory):.3g} GiB"
    for band in BANDS:
        divisor = 1.0 if band.over is None else run.latest(band.over)
        if (value := run.latest(band.metric)) is not None and divisor:
            ratio = value / divisor
            yield (
                f"{band.name} (normal: {band.says})",
                f"{ratio:.3g}{'' if band.low <= ratio <= band.high else UNUSUAL}",
            )


def saved_speed_up(run: RunLog) -> float | None:
    """Flat tokens over the tokens that updates computed; None if no update reports it."""
    saved = run.mean("tree/realised_saving")
    return None if saved is None or saved >= 1 else 1 / (1 - saved)


def gained_step(run: RunLog) -> str | None:
    """How long a step of rows would take, if its passes over rows took time by tokens; None without times or trees."""
    step, flat, unique = (run.mean(name) for name in (STEP, "tree/flat_tokens", "tree/unique_tokens"))
    passes = sum(_seconds(run, name) for name in SHORTENED)
    by_tokens = saved_speed_up(run) or (flat / unique if flat and unique else None)
    if not step or not passes or by_tokens is None:
        return None
    rows = step + passes * (by_tokens - 1)
    return f"{rows / step:.2f} times: rows {rows:.2f} s, trees {step:.2f} s ({passes:.2f} s in log-probs and updates)"


def _seconds(run: RunLog, timer: str) -> float:
    """Mean seconds of a step in one of its parts; a step without the timer spent none."""
    return sum(seconds or 0.0 for seconds in run.column(timer)) / len(run.steps)


def compare_rows(run: RunLog, other: RunLog) -> list[tuple[str, str]]:
    """(name, value): times of both runs, and how many times as long the second run takes."""
    rows = []
    for metric, name in (("timing_s/update_actor", "actor's update"), (STEP, "step")):
        first, second = run.mean(metric), other.mean(metric)
        if first and second:
            value = f"{first:.2f}, {second:.2f} ({second / first:.2f} times)"
            rows.append((f"{name}, seconds: this run, second run", value))
    return rows


def build_report(runs: Sequence[RunLog], *, rows: Sequence[tuple[str, str]] = (), more: str = "") -> str:
    """The page of one or two runs, the second dashed; `rows` extend the table, `more` is HTML below the charts."""
    # matplotlib takes a second to import; `--watch` does not need it.
    from tree_rl.run_report.charts import draw_section, draw_times

    run, *others = runs
    rows = [*summary_rows(run), *(row for other in others for row in compare_rows(run, other)), *rows]
    table = "".join(f"<tr><td>{escape(name)}</td><td>{escape(value)}</td></tr>" for name, value in rows)
    names = escape(run.name) + "".join(f"; dashed: {escape(other.name)}" for other in others)
    times = [
        (
            f"Where the time goes{suffix}",
            "Seconds of each step by part, and of the validation after it.",
            draw_times(one),
            NO_TIMES,
        )
        for one, suffix in zip(runs, SUFFIXES, strict=False)
    ]
    first, *more_charts = [(one.title, one.about, draw_section(one, runs), one.missing) for one in SECTIONS]
    charts = [first, *times, *more_charts]
    drawn = "".join(
        f'<section><h2>{escape(title)}</h2><p class="about">{escape(about)}</p>{chart}</section>\n'
        for title, about, chart, _ in charts
        if chart is not None
    )
    missing = [(title, why) for title, _, chart, why in charts if chart is None]
    body = (
        f'<h1>Run report</h1>\n<p class="lead">{names}</p>\n<table>{table}</table>\n'
        f'<div class="charts">\n{drawn}</div>\n{_folded(missing)}{more}'
        '<p class="about">Next: <code>tree-rl view RUN</code> shows the trees that a run dumped '
        "(<code>rollout.custom.tree_dump_dir</code>).</p>"
    )
    return page(f"Run report: {escape(run.name)}", body)


NO_TIMES = "The run's log has no times."
SUFFIXES = ("", ", second run")


def _folded(missing: Sequence[tuple[str, str]]) -> str:
    """The charts without data, closed: their titles, and how to get them."""
    if not missing:
        return ""
    lines = "".join(f"<li><b>{escape(title)}</b>: {escape(why)}</li>" for title, why in missing)
    charts = counted(len(missing), "chart")
    return f"<details><summary>{charts} without data in this run</summary><ul>{lines}</ul></details>\n"
