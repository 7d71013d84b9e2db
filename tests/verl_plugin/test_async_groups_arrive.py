"""Groups of which different weights drew the sessions: each trains whole, in one mini-batch; its lag is shown.

That verl's buffer hands out whole groups alone is held in `test_async_trainers_ray.py`.
"""

from typing import Any

import numpy as np
import pytest
from local_trainer import LocalQueue, make_trainer, put_rows

from tree_rl.verl_plugin.trainer.step_metrics import staleness_metrics

# Prompt -> sessions -> branches; the weights that drew each prompt's first and later sessions.
BRANCHES = [[1, 3], [2, 1], [1, 1], [4, 1]]
VERSIONS = [(3, 4), (4, 4), (1, 4), (2, 2)]
TRAINER_VERSION = 4


def test_a_batch_of_mixed_versions_keeps_groups_in_one_mini_batch_and_reports_its_lag(queue: LocalQueue) -> None:
    batch, lags = put_rows(queue, BRANCHES), []
    for key, tag in zip(batch.keys, batch.tags, strict=True):
        uid, session, _ = key.rsplit("_", 2)
        version = VERSIONS[int(uid.removeprefix("uid-"))][int(session)]
        tag |= {"min_global_steps": version, "max_global_steps": version}
        lags.append(TRAINER_VERSION - version)
    trainer, metrics = make_trainer(), dict[str, Any]()
    trainer.global_steps = TRAINER_VERSION + 1
    balanced = trainer._balance_batch(batch, metrics)
    # One rank after the other, each with all mini-batches in order.
    of_rank = len(balanced) // 2
    block = of_rank // trainer._steps[0]
    homes: dict[str, set[int]] = {}
    for row, (key, tag) in enumerate(zip(balanced.keys, balanced.tags, strict=True)):
        if not tag.get("is_padding", False):
            homes.setdefault(key.rsplit("_", 2)[0], set()).add(row % of_rank // block)
    assert len(homes) == len(BRANCHES) and all(len(places) == 1 for places in homes.values())
    assert metrics["tree/staleness/oldest/mean"] == pytest.approx(sum(lags) / len(lags))
    assert metrics["tree/staleness/oldest/max"] == max(lags) == 3
    assert metrics["tree/mixed_version_trees"] == 2 / 4
    assert metrics["tree/mixed_version_rows"] == 0


def test_lags_count_from_the_oldest_and_newest_version_of_rows_that_have_one() -> None:
    spans = [(3, 3), (1, 3), (2, 2), (4, 4), (None, None)]
    tags = [{"min_global_steps": low, "max_global_steps": high} for low, high in spans]
    figures = staleness_metrics(tags, np.array([0, 0, 1, 2, 2]), trainer_version=4)
    assert figures["tree/staleness/oldest/mean"] == (1 + 3 + 2 + 0) / 4
    assert figures["tree/staleness/newest/mean"] == (1 + 1 + 2 + 0) / 4
    assert (figures["tree/staleness/oldest/max"], figures["tree/staleness/newest/max"]) == (3, 2)
    # Group 0 has rows of several versions, one of which was continued.
    assert (figures["tree/mixed_version_rows"], figures["tree/mixed_version_trees"]) == (1 / 4, 1 / 3)
    assert staleness_metrics([{}, tags[-1]], np.array([0, 0]), trainer_version=4) == {}
