"""Overlap of recorded agent trajectories under the Qwen vocabulary: the figures of examples/tau_bench_airline."""

from pathlib import Path

import numpy as np
import pytest
from fixture_types import Printed

from tree_rl.inspection.chat_rows import RowsPer
from tree_rl.inspection.model_shape import QWEN2_5_7B
from tree_rl.inspection.overlap_by_group import report_groups, total_of
from tree_rl.inspection.row import Row
from tree_rl.inspection.row_file import read_row_file
from tree_rl.tree.report.branching import BranchCause

Recorded = dict[RowsPer, list[Row]]


@pytest.fixture(scope="module")
def recorded(airline_trajectories: Path, qwen_tokenizer: Path) -> Recorded:
    return {per: read_row_file(airline_trajectories, tokenizer=qwen_tokenizer, rows_per=per) for per in RowsPer}


@pytest.mark.parametrize(
    ("rows_per", "num_rows", "por"), [(RowsPer.TRIAL, 200, 0.24), (RowsPer.CALL, 2454, 0.92)], ids=["trial", "call"]
)
def test_overlap_of_recorded_trajectories(rows_per: RowsPer, num_rows: int, por: float, recorded: Recorded) -> None:
    reports = report_groups(recorded[rows_per])
    total = total_of(reports)
    assert (len(reports), total.overlap.paths) == (50, num_rows)
    assert total.overlap.por == pytest.approx(por, abs=0.01)
    assert 1.0 < QWEN2_5_7B.flop_bound(total.overlap) < total.overlap.token_bound
    # Trials part where the simulated user speaks; a call's row ends where the next call goes on.
    assert total.causes[BranchCause.OBSERVATION] >= 145
    assert (total.causes[BranchCause.PREFIX_END] > 0) is (rows_per is RowsPer.CALL)
    # Each sampled token is trained once per trial.
    sampled = {per: sum(int(np.sum(row.trained)) for row in rows) for per, rows in recorded.items()}
    assert sampled[RowsPer.TRIAL] == sampled[RowsPer.CALL] > 100_000


def test_command_prints_totals_and_draws(printed: Printed, airline_trajectories: Path, qwen_tokenizer: Path) -> None:
    given = ("--tokenizer", qwen_tokenizer, "--groups", 2, "--draw", "text", "-", "--draw-group", 3)
    out = printed("inspect", airline_trajectories, *given)
    assert "0.240" in out and "48 more groups" in out
    assert "Airline Agent Policy" in out
