"""A phase shows its steps, hides its noise, and fails loudly with the end of its log."""

import json
import sys
from dataclasses import replace
from pathlib import Path

import pytest
from quickstart.progress import Phase, PhaseFailedError, run_phase

from tree_rl.inspection.files.run_log import read_steps


def phase_of(tmp_path: Path, code: str, *, limit_seconds: float = 60.0) -> Phase:
    metrics = tmp_path / "metrics.jsonl"

    return Phase(
        name="grpo",
        command=[sys.executable, "-c", code],
        log=tmp_path / "logs" / "grpo.log",
        limit_seconds=limit_seconds,
        metrics=metrics,
        every=3,
        environment={"METRICS": str(metrics)},
    )


def test_steps_are_shown_and_noise_goes_to_the_log(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    code = (
        "import json, os\n"
        "print('noise')\n"
        "with open(os.environ['METRICS'], 'w') as f:\n"
        "    for s in (1, 2, 3): f.write(json.dumps({'step': s, 'data': {'train/loss': s, 'tree/por': .5}}) + '\\n')\n"
        "    f.write(json.dumps({'step': 3, 'data': {'val/loss': 1.0}}) + chr(10))\n"
    )
    assert run_phase(phase_of(tmp_path, code)) > 0
    shown = capsys.readouterr().out
    lines = [line for line in shown.splitlines() if "step" in line]
    assert lines == [f"[grpo   ] step   {step}  loss {step}.0000  POR 0.500" for step in (1, 3)]
    assert "noise" not in shown
    assert (tmp_path / "logs" / "grpo.log").read_text() == "noise\n"


def test_failure_names_the_phase_and_shows_the_end_of_its_log(tmp_path: Path) -> None:
    code = "print('early'); [print('line', i) for i in range(40)]; raise SystemExit(3)"
    with pytest.raises(PhaseFailedError, match=r"grpo: exit code 3 .*grpo.log") as caught:
        run_phase(phase_of(tmp_path, code))
    assert "line 39" in str(caught.value)
    assert "early" not in str(caught.value)


def test_a_phase_that_hangs_is_ended(tmp_path: Path) -> None:
    with pytest.raises(PhaseFailedError, match="ran past 1 s"):
        run_phase(phase_of(tmp_path, "import time; time.sleep(60)", limit_seconds=1.0))


def test_a_phase_that_has_shown_enough_is_ended_and_counts_as_done(tmp_path: Path) -> None:
    begun = tmp_path / "begun"
    code = f"import pathlib, time; pathlib.Path({str(begun)!r}).touch(); time.sleep(60)"
    assert run_phase(replace(phase_of(tmp_path, code), seen_enough=begun.exists)) < 50


def test_a_line_that_is_still_being_written_waits(tmp_path: Path) -> None:
    metrics = tmp_path / "metrics.jsonl"
    metrics.write_text(json.dumps({"step": 1, "data": {}}) + '\n{"step": 2, "da')
    assert read_steps(metrics) == [(1, {})]
    assert read_steps(tmp_path / "missing.jsonl") == []
