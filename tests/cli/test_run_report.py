"""`tree-rl report`: figures against the log itself, damaged logs, pages that load nothing."""

import json
import math
import random
import re
from pathlib import Path

import pytest
from fixture_types import Printed, Refused
from rich.console import RenderableType

from tree_rl.commands import report
from tree_rl.inspection.files.run_log import read_run
from tree_rl.run_report.charts import draw_times
from tree_rl.run_report.report import summary_rows
from tree_rl.run_report.sections import SECTIONS

CONSOLE = Path(__file__).with_name("console_of_a_run.log")
"""Two steps of the quickstart, as verl's console logger and Ray wrote them."""


def step(number: int, **more: float) -> str:
    drawn = random.Random(number)
    score = {"tree/session_score/mean": number / 10, "critic/score/mean": drawn.random()}
    actor = {"training/global_step": number, "actor/pg_loss": -drawn.random(), "actor/ppo_kl": drawn.random() / 100}
    tree = {"por": 0.8, "realised_saving": 0.75, "flat_tokens": 1000.0 * number, "unique_tokens": 200.0 * number}
    tree |= {"self_check_error": 1e-6, "imbalance": 1.25, "imbalance_bound": 1.0}
    tree |= {"session/ended_completed": 0.75, "session/ended_limit": 0.25, "session/drift_edited": 0.5}
    seconds = {"timing_s/gen": 6.0, "timing_s/update_actor": 3.0, "timing_s/step": 10.0}
    data = {**score, **actor, **{f"tree/{name}": value for name, value in tree.items()}, **seconds}
    data["actor/perf/max_memory_allocated_gb"] = 12.5
    return json.dumps({"step": number, "data": {**data, **more}})


def log_file(folder: Path, lines: list[str], name: str = "metrics.jsonl") -> Path:
    folder.mkdir(exist_ok=True)
    (folder / name).write_text("\n".join(lines) + "\n")
    return folder


def test_a_report_says_what_the_log_says(printed: Printed, tmp_path: Path) -> None:
    run = log_file(tmp_path / "run", [step(number) for number in range(1, 9)])
    out = printed("report", run, "--out", tmp_path / "page.html")
    text = " ".join(out.split())
    assert "mean reward, first and last 5 steps 0.300, 0.600" in text, out
    assert "token bound of updates (most that trees can give) 5.00 times" in text
    assert "by the tokens that updates left out 4.00 times" in text
    # 3 s of updates as trees, 4 times that as rows: 10 + 3 * 3.
    assert "gain of a whole step, estimated by tokens 1.90 times: rows 19.00 s, trees 10.00 s (3.00 s in" in text
    assert "slowest rank over the best possible (normal: up to 1.1) 1.25, unusual" in text
    assert "sessions completed (normal: over half) 0.75" in text and "0.75, unusual" not in text
    assert "that the client changed (normal: depends on the agent) 0.5" in text and "0.5, unusual" not in text
    assert "rollouts 60%, actor's update 30%" in text
    page = (tmp_path / "page.html").read_text()
    assert page.count("<svg") == 1 + len(SECTIONS) and "<details>" not in page
    for title in ("Reward", "Where the time goes", *(section.title for section in SECTIONS)):
        assert f"<h2>{title}</h2>" in page
    for words in ("the rest", "sessions", "slowest rank", "ended"):
        assert words in page
    assert 'name="viewport"' in page and "prefers-color-scheme: dark" in page
    # On a phone charts shrink, long words break, and nothing has a width of its own.
    assert page.count("viewBox") == page.count("<svg") and "svg { display: block; width: 100%" in page
    assert "overflow-wrap: break-word" in page and not re.search(r"(?:min-|[;{] *)width: *\d{3,}px", page)
    assert not re.search(r"(?:src|href)=\"(?!data:|#)", page) and "@import" not in page and "<script" not in page


def test_two_runs_lie_over_each_other(printed: Printed, tmp_path: Path) -> None:
    trees = log_file(tmp_path / "trees", [step(number) for number in range(1, 4)])
    slow = {"timing_s/step": 22.5, "timing_s/update_actor": 15.0}
    rows = log_file(tmp_path / "rows", [step(number, **slow) for number in range(1, 4)])
    out = printed("report", trees, "--against", rows, "--out", tmp_path / "page.html")
    assert "3.00, 15.00 (5.00 times)" in out and "10.00, 22.50 (2.25 times)" in out
    page = (tmp_path / "page.html").read_text()
    assert page.count("<svg") == 2 + len(SECTIONS)
    assert "Where the time goes, second run" in page and "dashed:" in page
    assert page.count(">sessions</text>") == 1
    assert "reward, first and last step 0.100, 0.300" in " ".join(out.split())


def test_what_a_run_lacks_is_named_with_its_key(printed: Printed, tmp_path: Path) -> None:
    line = json.dumps({"step": 1, "data": {"train/loss": 2.0}})
    out = printed("report", log_file(tmp_path / "run", [line]), "--out", tmp_path / "page.html")
    assert "steps" in out
    page = (tmp_path / "page.html").read_text()
    assert page.count("<svg") == page.count("<section>") == 1
    folded = re.search(r"<summary>(\d+) charts without data in this run</summary><ul>(.*)</ul></details>", page)
    assert folded is not None and int(folded[1]) == folded[2].count("<li>") == len(SECTIONS)
    assert "gain of a whole step" not in out
    # The only tick of the axis.
    assert ">1</text>" in page and ">1.005</text>" not in page
    assert "use_kl_loss=true" in page and "tree_sync" in page


def test_a_console_log_says_the_same_as_its_file() -> None:
    found = read_run(CONSOLE)
    assert found.steps == (1, 2)
    assert found.latest("tree/token_bound") == pytest.approx(1 / (1 - (found.latest("tree/por") or 0)))
    # Every figure of the lines that this reads by hand.
    for text, metrics in zip(CONSOLE.read_text().splitlines(), found.metrics, strict=True):
        by_hand = dict(part.rsplit(":", 1) for part in text.split("step:", 1)[1].split(" - ")[1:])
        read = {name: float(value.split("(")[-1].rstrip(")")) for name, value in by_hand.items()}
        numbers = {name: value for name, value in read.items() if math.isfinite(value)}
        assert dict(metrics) == numbers


def test_damaged_logs_give_what_they_hold(tmp_path: Path) -> None:
    lines = [
        "", "not json", "[1, 2]", '{"step": 1}', '{"step": "1", "data": {}}', '{"step": 1, "data": []}',
        step(1), step(2), json.dumps({"step": 2, "data": {"val-core/score": 0.5}}), step(3, **{"tree/por": math.nan}),
        step(2, **{"tree/por": 0.1}), step(3, **{"tree/por": 0.2}), step(4)[:60],
    ]  # fmt: skip
    log = read_run(log_file(tmp_path / "run", lines))
    assert log.steps == (1, 2, 3) and log.restarts == 1
    assert log.column("tree/por") == [0.8, 0.1, 0.2]
    late = json.dumps({"step": 8, "data": {"val-core/score": 0.5}})
    resumed = read_run(log_file(tmp_path / "resumed", [*map(step, range(1, 10)), late, *map(step, (5, 6))]))
    assert resumed.steps == (1, 2, 3, 4, 5, 6) and resumed.restarts == 1
    cut = tmp_path / "cut.log"
    cut.write_text("step:1 - timing_s/step:10.5 - tree/por:0.25\nstep:2 - timing_s/step:10.5 - tree/por:0.2")
    assert read_run(cut).column("tree/por") == [0.25, None]
    marked = log_file(tmp_path / "marked", ["\ufeff" + step(1), step(2)])
    assert read_run(marked).steps == (1, 2)
    folder = log_file(tmp_path / "other", [step(1)], "sft.jsonl")
    (folder / "grpo.jsonl").write_text(step(7) + "\n")
    assert read_run(folder).steps in ((1,), (7,))


@pytest.mark.parametrize(
    "line",
    [
        "step:1 - timing_s/step:1.5 - tree/por:1.2.3 - train/loss:0.5",
        '{"step": 1, "data": {"timing_s/step": 1.5, "train/loss": 0.5, "tree/por": 1' + "0" * 400 + "}}",
    ],
)
def test_figures_that_are_no_numbers_and_what_is_no_file_are_skipped(line: str, tmp_path: Path) -> None:
    (tmp_path / "old.log").mkdir()
    (tmp_path / "latest.log").symlink_to(tmp_path / "gone.log")
    run = log_file(tmp_path, [f"step:{'1' * 5000} - train/loss:1", line], "run.log")
    assert read_run(run).metrics == ({"timing_s/step": 1.5, "train/loss": 0.5},)


def test_figures_too_large_to_draw_are_left_out_and_names_cannot_change_the_page(
    printed: Printed, tmp_path: Path
) -> None:
    lines = [step(1), step(2, **{"critic/score/mean": 1e308, "actor/pg_loss": -1e308}), step(10**20)]
    run = log_file(tmp_path / "<img src=x onerror=alert(1)>", lines)
    assert "2 (last: 2)" in printed("report", run, "--out", tmp_path / "page.html")
    assert "<img" not in (tmp_path / "page.html").read_text()


def said_of(folder: Path, *lines: str) -> dict[str, str]:
    return dict(summary_rows(read_run(log_file(folder, [*lines]))))


def test_most_memory_is_that_of_any_step(tmp_path: Path) -> None:
    lines = [step(number, **{"actor/perf/max_memory_allocated_gb": 40.0 - number}) for number in (1, 2)]
    assert said_of(tmp_path / "run", *lines)["most memory"] == "39 GiB"
    sft = json.dumps({"step": 1, "data": {"train/loss": 2.0, "perf/max_memory_allocated_gb": 7.5}})
    assert said_of(tmp_path / "sft", sft)["most memory"] == "7.5 GiB"


def test_what_few_steps_do_counts_over_all_steps(tmp_path: Path) -> None:
    nothing = {"tree/session_score/mean": -1e-5, "timing_s/step": 10.0}
    saves = {"timing_s/step": 100.0, "timing_s/save_checkpoint": 80.0, "timing_s/old_log_prob": 10.0}
    saves["timing_s/testing"] = 200.0  # After the step.
    said = said_of(tmp_path / "run", *(step(at, **nothing) for at in range(1, 10)), step(10, **{**nothing, **saves}))
    # 190 s of steps: 80 in one checkpoint, 60 in rollouts, 30 in updates; four times the passes are 120 s more.
    assert said["most of it"] == "checkpoint 42%, rollouts 32%, actor's update 16%"
    assert said["gain of a whole step, estimated by tokens"].startswith("1.63 times: rows 31.00 s, trees 19.00 s (4.00")
    assert said["mean reward, first and last 5 steps"] == "0.000, 0.000"
    assert "most of it" not in said_of(tmp_path / "instant", step(1, **{"timing_s/step": 0.0}))


def test_the_page_of_a_long_run_has_one_outline_per_part(tmp_path: Path) -> None:
    run = read_run(log_file(tmp_path / "run", [step(number) for number in range(1, 4001)]))
    chart = draw_times(run)
    # Ticks, legend and outlines. A bar for each step would take minutes to draw.
    assert chart is not None and "the rest" in chart and chart.count("<path") < 100


def test_mistakes_end_in_one_line(refused: Refused, tmp_path: Path) -> None:
    empty, absent = log_file(tmp_path / "run", ["{}"]), tmp_path / "none"
    for run, said in ((empty, "trainer.logger=[console,file]"), (absent, "none")):
        refused(said, "report", run, "--out", tmp_path / "page.html")
        assert not (tmp_path / "page.html").exists()
    refused("no such file", "report", absent, "--watch")


def test_watching_shows_the_latest_steps(printed: Printed, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Two looks, then Ctrl+C: the first finds no step yet."""
    monkeypatch.setenv("COLUMNS", "160")
    monkeypatch.setattr(report, "SECONDS_BETWEEN_LOOKS", 0.0)
    run, looks = log_file(tmp_path / "run", ["{}"]), iter([0, 1])
    look = report.latest_steps

    def latest_steps(path: Path) -> RenderableType:
        number = next(looks, None)
        if number is None:
            raise KeyboardInterrupt
        if number == 1:
            log_file(run, [step(number) for number in range(1, 31)])
        shown = look(path)
        assert ("no step yet" in str(shown)) == (number == 0)
        return shown

    monkeypatch.setattr(report, "latest_steps", latest_steps)
    out = printed("report", run, "--watch")
    rows = [line.split() for line in out.splitlines() if re.match(r"\s*\d+\s", line)]
    assert [row[0] for row in rows] == [str(number) for number in range(19, 31)]
    loss = f"{json.loads(step(30))['data']['actor/pg_loss']:.4f}"
    assert rows[-1][1:] == ["3.000", loss, "0.800", "75%", "6.0", "3.0", "10.0", "12.5", "75%"]
