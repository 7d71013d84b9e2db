"""The quickstart's task rewards what is on disk, its phases show their steps, its report reads what a run left."""

import asyncio
import json
import random
import re
import sys
from dataclasses import replace
from pathlib import Path

import pytest
from quickstart.experts import HABITS, act, demonstrate
from quickstart.prepare import demonstration_table, prompt_table, task_words
from quickstart.progress import Phase, PhaseFailedError, run_phase
from quickstart.replay import group_advantages
from quickstart.report import report
from quickstart.task import ROOMS, draw_task, grade_report
from quickstart.tokenizer import build_tokenizer
from record_files import write
from transformers import PreTrainedTokenizerFast

from tree_rl.tree import Forest
from tree_rl.verl_plugin.agent_loops.tree_dump import read_trees

FILES = {"attic.txt": "stock: attic 7\n", "barn.txt": "stock: barn 0\n", "shed.txt": "stock: shed 3\n"}
EARNED = {"careful": 1.0, "forgetful": 1 / 3, "hasty": 1 / 3, "quitter": 0.0}
STEPS = 10
ROWS = {"careful": 5, "forgetful": 5, "hasty": 3, "quitter": 1}


@pytest.fixture(scope="module")
def tokenizer() -> PreTrainedTokenizerFast:
    return build_tokenizer(task_words())


@pytest.mark.parametrize(
    ("said", "reward"),
    [
        *((said, 1.0) for said in ("attic 7 barn 0 shed 3\n", "shed 3 attic 7 barn 0")),
        ("attic 7", 1 / 3),
        *((said, 0.0) for said in ("attic 1 attic 7", "attic seven barn", "", None)),
    ],
)
def test_reward_is_the_share_of_rooms_whose_first_mention_is_right(said: str | None, reward: float) -> None:
    assert grade_report(said, ["attic", "barn", "shed"], FILES) == pytest.approx(reward)


@pytest.mark.parametrize("habit", HABITS)
def test_an_expert_earns_what_its_commands_achieve_and_branches(habit: str, tokenizer: PreTrainedTokenizerFast) -> None:
    (record,) = asyncio.run(demonstrate([(HABITS[habit], draw_task(random.Random(1)))], tokenizer))
    assert record.done.reward == pytest.approx(EARNED[habit])
    assert record.done.outcome.is_complete and record.done.outcome.malformed_calls == 0
    table = demonstration_table([record])
    assert len(table) == ROWS[habit]
    if len(table) > 1:
        assert Forest.from_rows(list(table.input_ids)).por > 0.3


def test_words_and_digits_are_single_tokens_and_any_text_survives(tokenizer: PreTrainedTokenizerFast) -> None:
    for word in [*(f" {room}" for room in ROOMS), *(f" {digit}" for digit in range(10)), "cat", "echo"]:
        assert len(tokenizer.encode(word)) == 1, word
    for text in (act("read", ["ls -la | wc -c"]), "Grüße, 世界 \t\n\n  42"):
        assert tokenizer.decode(tokenizer.encode(text), skip_special_tokens=False) == text


def test_the_template_strips_the_reasoning_of_earlier_turns(tokenizer: PreTrainedTokenizerFast) -> None:
    turn = {"role": "assistant", "content": "", "reasoning_content": "hm", "tool_calls": []}
    messages = [{"role": "user", "content": "x"}, turn]
    assert "hm" in tokenizer.apply_chat_template(messages, tokenize=False)
    later = [*messages, {"role": "tool", "content": "y"}]
    assert "hm" not in tokenizer.apply_chat_template(later, tokenize=False)


def test_tasks_follow_from_the_seed_and_shares_of_the_experts_add_up() -> None:
    assert sum(habit.share for habit in HABITS.values()) == pytest.approx(1.0)
    assert prompt_table(4, seed=3).equals(prompt_table(4, seed=3))
    assert not prompt_table(4, seed=3).equals(prompt_table(4, seed=4))


def phase_of(tmp_path: Path, code: str, *, limit_seconds: float = 60.0) -> Phase:
    files = {"log": tmp_path / "logs" / "grpo.log", "metrics": tmp_path / "metrics.jsonl"}
    shell, command = {"METRICS": str(files["metrics"])}, [sys.executable, "-c", code]
    return Phase(name="grpo", command=command, limit_seconds=limit_seconds, every=3, environment=shell, **files)


def test_steps_are_shown_and_noise_goes_to_the_log(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    steps = [{"step": step, "data": {"train/loss": step, "tree/por": 0.5}} for step in (1, 2, 3)]
    lines = map(json.dumps, [*steps, {"step": 3, "data": {"val/loss": 1.0}}])
    text = "\n".join([*lines, '{"step": 6, "da'])
    code = f"import os; print('noise'); open(os.environ['METRICS'], 'w').write({text!r})"
    assert run_phase(phase_of(tmp_path, code)) > 0
    shown = capsys.readouterr().out
    expected = [f"[grpo   ] step   {step}  loss {step}.0000  POR 0.500" for step in (1, 3)]
    assert [line for line in shown.splitlines() if "step" in line] == expected
    assert "noise" not in shown
    assert (tmp_path / "logs" / "grpo.log").read_text() == "noise\n"


def test_failure_names_the_phase_and_shows_the_end_of_its_log(tmp_path: Path) -> None:
    code = "print('early'); [print('line', i) for i in range(40)]; raise SystemExit(3)"
    with pytest.raises(PhaseFailedError, match=r"grpo: exit code 3 .*grpo.log") as caught:
        run_phase(phase_of(tmp_path, code))
    assert "line 39" in str(caught.value) and "early" not in str(caught.value)


def test_a_phase_that_hangs_is_ended(tmp_path: Path) -> None:
    with pytest.raises(PhaseFailedError, match="ran past 1 s"):
        run_phase(phase_of(tmp_path, "import time; time.sleep(60)", limit_seconds=1.0))


def test_a_phase_that_has_shown_enough_is_ended_and_counts_as_done(tmp_path: Path) -> None:
    begun = tmp_path / "begun"
    code = f"import pathlib, time; pathlib.Path({str(begun)!r}).touch(); time.sleep(60)"
    assert run_phase(replace(phase_of(tmp_path, code), seen_enough=begun.exists)) < 50


@pytest.fixture
def finished_run(tmp_path: Path, tokenizer: PreTrainedTokenizerFast) -> Path:
    tokenizer.save_pretrained(tmp_path / "start" / "model")
    figures = {"timing_s/gen": 3.0, "timing_s/step": 5.0, "tree/flat_tokens": 1000.0, "tree/unique_tokens": 250.0}
    figures |= {"tree/self_check_error": 1e-6, "tree/por": 0.75}
    steps = [{"step": at, "data": {**figures, "tree/session_score/mean": at / STEPS}} for at in range(1, STEPS + 1)]
    write(tmp_path / "grpo.jsonl", steps)
    seconds = {"tree": [1.0, 1.2, 1.1], "flat": [4.0, 4.4, 4.1]}
    write(tmp_path / "replay.json", {"rows": 4, "seconds": seconds, "log_prob_error": 2e-6, "gradient_error": 3e-6})
    (tmp_path / "trees").mkdir()
    for step in (1, STEPS):
        row = {"uid": "a", "index": 0, "step": step, "prompt_ids": [300, 301, 302], "response_mask": [1, 1, 0]}
        drawn = [{"session": n, "response_ids": [303, 304 + n, 305], "reward": float(n)} for n in range(3)]
        write(tmp_path / "trees" / f"train-step{step:06d}-1.jsonl", [row | one for one in drawn])
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
    assert "http-equiv" not in page and 'src="' not in page
    assert not re.search(r"min-width: [1-9]", page), "the tree fits a phone"


def test_advantages_of_the_replay_count_a_session_once_and_missing_rows_are_named(finished_run: Path) -> None:
    rows = read_trees(finished_run / "trees", 1)
    assert group_advantages(rows) == pytest.approx([-1.0, 0.0, 1.0], abs=1e-5)
    twice = [*rows, rows[2]]
    assert group_advantages(twice) == pytest.approx([-1.0, 0.0, 1.0, 1.0], abs=1e-5)
    with pytest.raises(FileNotFoundError, match="no rows of step 7"):
        read_trees(finished_run / "trees", 7)
