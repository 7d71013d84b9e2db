"""Overlap of recorded agent trajectories under the Qwen vocabulary: the figures of examples/tau_bench_airline."""

from pathlib import Path

import numpy as np
import pytest
from typer.testing import CliRunner

from tree_rl.cli import app
from tree_rl.inspection.chat_rows import RowsPer
from tree_rl.inspection.model_shape import QWEN2_5_7B
from tree_rl.inspection.overlap_by_group import report_groups, total_of
from tree_rl.inspection.row_file import read_row_file
from tree_rl.inspection.run_plan import plan_run
from tree_rl.tree.report.branching import BranchCause


@pytest.mark.parametrize(
    ("rows_per", "num_rows", "por"), [(RowsPer.TRIAL, 200, 0.24), (RowsPer.CALL, 2454, 0.92)], ids=["trial", "call"]
)
def test_overlap_of_recorded_trajectories(
    rows_per: RowsPer, num_rows: int, por: float, airline_trajectories: Path, qwen_tokenizer: Path
) -> None:
    rows = read_row_file(airline_trajectories, tokenizer=qwen_tokenizer, rows_per=rows_per)
    reports = report_groups(rows)
    total = total_of(reports)
    assert (len(reports), total.overlap.paths) == (50, num_rows)
    assert total.overlap.por == pytest.approx(por, abs=0.01)
    assert 1.0 < QWEN2_5_7B.flop_bound(total.overlap) < total.overlap.token_bound
    # Trials part where the simulated user speaks; a call's row ends where the next call goes on.
    assert total.causes[BranchCause.OBSERVATION] >= 145
    assert (total.causes[BranchCause.PREFIX_END] > 0) is (rows_per is RowsPer.CALL)


def test_each_sampled_token_is_trained_once_per_trial(airline_trajectories: Path, qwen_tokenizer: Path) -> None:
    sampled = {}
    for rows_per in RowsPer:
        rows = read_row_file(airline_trajectories, tokenizer=qwen_tokenizer, rows_per=rows_per)
        sampled[rows_per] = sum(int(np.sum(row.trained)) for row in rows)
    assert sampled[RowsPer.TRIAL] == sampled[RowsPer.CALL] > 100_000


def test_a_plan_computes_every_token_once(airline_trajectories: Path, qwen_tokenizer: Path) -> None:
    rows = read_row_file(airline_trajectories, tokenizer=qwen_tokenizer, rows_per=RowsPer.CALL)
    unique = total_of(report_groups(rows)).overlap.unique_tokens
    for max_tokens in (16384, 8192):
        plan = plan_run(rows, max_tokens)
        whole = [forward.unique_tokens for forward in plan.whole]
        assert sum(whole) + sum(len(part.partition_of_token) for part in plan.partitioned) == unique
        sizes = list(whole)
        sizes += [partition.num_tokens for part in plan.partitioned for partition in part.partitions]
        assert sum(sizes) == unique
        assert max(sizes) <= max_tokens
        assert len(sizes) < len(plan.flat) / 5
        assert plan.partitioned


def test_command_says_how_each_group_runs(airline_trajectories: Path, qwen_tokenizer: Path) -> None:
    arguments = ["plan", str(airline_trajectories), "--tokenizer", str(qwen_tokenizer), "--rows", "call"]
    result = CliRunner().invoke(app, [*arguments, "--max-tokens", "16384", "--groups", "50"])
    assert result.exit_code == 0, result.output
    kinds = [line.split()[3] for line in result.output.splitlines()[9:59]]
    assert kinds == ["partitioned"] * kinds.count("partitioned") + ["whole"] * kinds.count("whole")
    assert min(kinds.count("partitioned"), kinds.count("whole")) > 0


def test_command_prints_totals_and_draws(airline_trajectories: Path, qwen_tokenizer: Path, tmp_path: Path) -> None:
    drawing = tmp_path / "tree.svg"
    arguments = ["inspect", str(airline_trajectories), "--tokenizer", str(qwen_tokenizer), "--groups", "2"]
    result = CliRunner().invoke(app, [*arguments, "--draw", "svg", str(drawing), "--draw-group", "3"])
    assert result.exit_code == 0, result.output
    assert "0.240" in result.output
    assert "48 more groups" in result.output
    assert drawing.read_text(encoding="utf-8").startswith("<svg")


def test_text_drawing_spells_the_system_prompt(airline_trajectories: Path, qwen_tokenizer: Path) -> None:
    arguments = ["inspect", str(airline_trajectories), "--tokenizer", str(qwen_tokenizer), "--draw", "text", "-"]
    result = CliRunner().invoke(app, arguments)
    assert "Airline Agent Policy" in result.output
