"""The report reads what a run left: metrics, replayed batch, dumped rows."""

import json
import re
from pathlib import Path

import pytest
from quickstart.prepare import task_words
from quickstart.replay import group_advantages
from quickstart.report import report
from quickstart.tokenizer import build_tokenizer

from tree_rl.verl_plugin.agent_loops.tree_dump import read_trees

STEPS = 10


@pytest.fixture
def finished_run(tmp_path: Path) -> Path:
    build_tokenizer(task_words()).save_pretrained(tmp_path / "start" / "model")
    with (tmp_path / "grpo.jsonl").open("w") as stream:
        for step in range(1, STEPS + 1):
            tree = {"flat_tokens": 1000.0, "unique_tokens": 250.0, "self_check_error": 1e-6, "por": 0.75}
            figures = {"tree/session_score/mean": step / STEPS, "timing_s/gen": 3.0, "timing_s/step": 5.0}
            figures |= {f"tree/{name}": value for name, value in tree.items()}
            stream.write(json.dumps({"step": step, "data": figures}) + "\n")
    replayed = {
        "rows": 4,
        "seconds": {"tree": [1.0, 1.2, 1.1], "flat": [4.0, 4.4, 4.1]},
        "log_prob_error": 2e-6,
        "gradient_error": 3e-6,
    }
    (tmp_path / "replay.json").write_text(json.dumps(replayed))
    (tmp_path / "trees").mkdir()
    for step in (1, STEPS):
        row = {"uid": "a", "index": 0, "step": step, "prompt_ids": [300, 301, 302], "response_mask": [1, 1, 0]}
        rows = [
            row | {"session": session, "response_ids": [303, 304 + session, 305], "reward": float(session)}
            for session in range(3)
        ]
        path = tmp_path / "trees" / f"train-step{step:06d}-1.jsonl"
        path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return tmp_path


def test_report_holds_the_figures_of_the_run(finished_run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    report(finished_run)
    shown = capsys.readouterr().out
    page = (finished_run / "report.html").read_text()
    figures = ("0.300, 0.800", "1,000, 250", "4.00 times", "1.10 s", "4.10 s", "3.7 times", "2.0e-06")
    for figure in (*figures, "5.0 s, 8.0 s (1.60 times)"):
        assert figure in shown and figure in page
    # Charts of reward, overlap, times and self-check, and a tree.
    assert page.count("<svg") == 5 and page.count("<mark>") == 2
    # The mean over the steps, which the picture repeats.
    assert "POR of the run 0.750" in page and page.count(" POR 0.") == 0
    assert "http-equiv" not in page
    assert 'src="' not in page
    assert not re.search(r"min-width: [1-9]", page), "the tree fits a phone"


def test_advantages_of_the_replay_count_a_session_once(finished_run: Path) -> None:
    rows = read_trees(finished_run / "trees", 1)
    assert group_advantages(rows) == pytest.approx([-1.0, 0.0, 1.0], abs=1e-5)
    twice = [*rows, rows[2]]
    assert group_advantages(twice) == pytest.approx([-1.0, 0.0, 1.0, 1.0], abs=1e-5)


def test_missing_rows_are_named(finished_run: Path) -> None:
    with pytest.raises(FileNotFoundError, match="no rows of step 7"):
        read_trees(finished_run / "trees", 7)
