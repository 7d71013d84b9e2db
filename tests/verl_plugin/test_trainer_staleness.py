"""How stale the rows of a batch are, and how many trees mix weight versions."""

from typing import Any

import numpy as np

from tree_rl.verl_plugin.trainer.step_metrics import staleness_metrics


def tags(*spans: tuple[int | None, int | None]) -> list[dict[str, Any]]:
    return [{"min_global_steps": low, "max_global_steps": high} for low, high in spans]


def test_rows_of_the_trainers_own_version_are_not_stale() -> None:
    figures = staleness_metrics(tags((4, 4), (4, 4), (4, 4)), np.array([0, 0, 1]), trainer_version=4)
    assert figures == dict.fromkeys(figures, 0.0)


def test_lags_count_from_the_oldest_and_from_the_newest_version_of_a_row() -> None:
    figures = staleness_metrics(tags((3, 3), (1, 3), (2, 2), (4, 4)), np.array([0, 0, 1, 2]), trainer_version=4)
    assert figures["tree/staleness/oldest/mean"] == (1 + 3 + 2 + 0) / 4
    assert figures["tree/staleness/oldest/max"] == 3
    assert figures["tree/staleness/newest/mean"] == (1 + 1 + 2 + 0) / 4
    assert figures["tree/staleness/newest/max"] == 2
    assert figures["tree/mixed_version_rows"] == 1 / 4


def test_a_tree_mixes_versions_through_its_rows_or_within_one() -> None:
    spans = [(3, 3), (2, 2), (1, 2), (1, 2), (5, 5), (5, 5), (0, 0)]
    figures = staleness_metrics(tags(*spans), np.array([0, 0, 1, 1, 2, 2, 3]), trainer_version=5)
    # Group 0 has rows of two versions, group 1 has rows that were continued; 2 and 3 have one version each.
    assert figures["tree/mixed_version_trees"] == 2 / 4
    assert figures["tree/mixed_version_rows"] == 2 / 7


def test_rows_without_versions_are_left_out_not_counted_as_fresh() -> None:
    some = staleness_metrics(tags((None, None), (2, 2)), np.array([0, 1]), trainer_version=4)
    assert some["tree/staleness/oldest/mean"] == 2
    assert staleness_metrics(tags((None, None)), np.array([0]), trainer_version=4) == {}
    assert staleness_metrics([{}], np.array([0]), trainer_version=4) == {}
