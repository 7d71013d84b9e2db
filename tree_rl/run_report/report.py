"""Summarises a run, as rows of a table and as one self-contained page."""

from collections.abc import Iterator, Sequence
from html import escape

from tree_rl.inspection.files.run_log import RunLog
from tree_rl.run_report.page_style import page
from tree_rl.run_report.sections import SECTIONS, TIMES

EDGE = 5
"""Number of steps whose mean represents the beginning or the end of a run."""
REWARDS = ("tree/session_score/mean", "critic/score/mean")


def summary_rows(run: RunLog) -> Iterator[tuple[str, str]]:
    """(name, value) of the main results that the run's log has."""
    yield "steps", f"{len(run.steps)} (last: {run.steps[-1]})" + (f", {run.restarts} restarts" if run.restarts else "")
    reward = next((name for name in REWARDS if run.has(name)), None)
    if reward is not None:
        values = [value for value in run.column(reward) if value is not None]
        first, last = (sum(part) / len(part) for part in (values[:EDGE], values[-EDGE:]))
        yield f"mean reward, first and last {min(EDGE, len(values))} steps", f"{first:.3f}, {last:.3f}"
    if (por := run.mean("tree/por")) is not None:
        yield "POR (share of the rows' tokens that repeat a prefix)", f"{por:.3f}"
    flat, unique = run.mean("tree/flat_tokens"), run.mean("tree/unique_tokens")
    if flat is not None and unique is not None:
        yield "tokens of a step: of all rows, of their trees", f"{flat:,.0f}, {unique:,.0f}"
    if (bound := predicted_speed_up(run)) is not None:
        yield "token bound of updates (most that trees can give)", f"{bound:.2f} times"
    if (reached := saved_speed_up(run)) is not None:
        yield "the same, of the tokens that updates really left out", f"{reached:.2f} times"
    step = run.mean("timing_s/step")
    if step is not None:
        yield "seconds of a step", f"{step:.2f}"
        share = [(run.mean(metric) or 0.0, name) for metric, name in TIMES]
        longest = ", ".join(f"{name} {part / step:.0%}" for part, name in sorted(share, reverse=True)[:3] if part)
        yield "most of it", longest or "not logged"
    for metric, name, unit in (
        ("actor/perf/max_memory_allocated_gb", "most memory", " GiB"),
        ("tree/imbalance", "slowest rank over the mean", ""),
        ("tree/self_check_error", "self-check (normal: 1e-5 in float32, 0.03 in bf16)", ""),
    ):
        if (value := run.latest(metric)) is not None:
            yield name, f"{value:.3g}{unit}"


def predicted_speed_up(run: RunLog) -> float | None:
    """Flat over unique tokens, over all steps; None without trees."""
    flat, unique = run.mean("tree/flat_tokens"), run.mean("tree/unique_tokens")
    return flat / unique if flat and unique else None


def saved_speed_up(run: RunLog) -> float | None:
    """Flat tokens over the tokens that updates computed; None if no update reports it."""
    saved = run.mean("tree/realised_saving")
    return None if saved is None or saved >= 1 else 1 / (1 - saved)


def compare_rows(run: RunLog, other: RunLog) -> list[tuple[str, str]]:
    """(name, value): times of both runs, and how many times as long the second run takes."""
    rows = []
    for metric, name in (("timing_s/update_actor", "actor's update"), ("timing_s/step", "step")):
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
    time_of = [(f"Where the time goes{suffix}", draw_times(one)) for one, suffix in zip(runs, SUFFIXES, strict=False)]
    charts = [_section(title, "Bars: seconds of each step by part.", chart, NO_TIMES) for title, chart in time_of]
    charts += [_section(one.title, one.about, draw_section(one, runs), one.missing) for one in SECTIONS]
    order = [*charts[len(runs) : len(runs) + 1], *charts[: len(runs)], *charts[len(runs) + 1 :]]
    body = (
        f'<h1>Run report</h1>\n<p class="lead">{names}</p>\n<table>{table}</table>\n'
        f'<div class="charts">\n{"".join(order)}</div>\n{more}'
        '<p class="about">Next: <code>tree-rl view RUN</code> shows the trees that a run dumped '
        "(<code>rollout.custom.tree_dump_dir</code>).</p>"
    )
    return page(f"Run report: {escape(run.name)}", body)


NO_TIMES = "The run's log has no times."
SUFFIXES = ("", ", second run")


def _section(title: str, about: str, chart: str | None, missing: str) -> str:
    inside = f'<p class="about">Not in this run. {escape(missing)}</p>' if chart is None else chart
    return f'<section><h2>{escape(title)}</h2><p class="about">{escape(about)}</p>{inside}</section>\n'
