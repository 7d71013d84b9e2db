"""How far the rows of a batch lag behind the trainer, and how many trees mix weight versions.

A version is the number of weight synchronisations before the tokens were drawn; verl's agent loops tag every row with
the oldest and the newest version that generated a token of its session. Legend: B rows, G groups (one per prompt).
"""

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np


def staleness_metrics(
    tags: Sequence[Mapping[str, Any]], group_of_row: np.ndarray, *, trainer_version: int
) -> dict[str, float]:
    """Staleness of the real rows of a batch.

    Args:
        tags: B tags of verl's rows with `min_global_steps` and `max_global_steps`; None where a rollout server reports
            no versions.
        group_of_row: int [B], group of each row, numbered 0 to G - 1; a group's rows share one tree.
        trainer_version: version of the weights that train on the batch.

    Returns:
        tree/staleness/oldest/mean and /max, over rows: trainer's version less the oldest that generated in the row;
        tree/staleness/newest/mean and /max: less the newest;
        tree/mixed_version_rows: share of rows that more than one version generated;
        tree/mixed_version_trees: share of groups whose rows come from more than one version.
        Rows without versions are left out; empty where no row has any.
    """
    known = [
        row
        for row, tag in enumerate(tags)
        if tag.get("min_global_steps") is not None and tag.get("max_global_steps") is not None
    ]
    if not known:
        return {}
    oldest_B = np.array([tags[row]["min_global_steps"] for row in known], dtype=np.int64)
    newest_B = np.array([tags[row]["max_global_steps"] for row in known], dtype=np.int64)
    groups, group_B = np.unique(np.asarray(group_of_row)[known], return_inverse=True)
    oldest_G = np.full(len(groups), np.iinfo(np.int64).max)
    newest_G = np.full(len(groups), np.iinfo(np.int64).min)
    np.minimum.at(oldest_G, group_B, oldest_B)
    np.maximum.at(newest_G, group_B, newest_B)
    return {
        "tree/staleness/oldest/mean": float((trainer_version - oldest_B).mean()),
        "tree/staleness/oldest/max": float((trainer_version - oldest_B).max()),
        "tree/staleness/newest/mean": float((trainer_version - newest_B).mean()),
        "tree/staleness/newest/max": float((trainer_version - newest_B).max()),
        "tree/mixed_version_rows": float((newest_B > oldest_B).mean()),
        "tree/mixed_version_trees": float((newest_G > oldest_G).mean()),
    }
