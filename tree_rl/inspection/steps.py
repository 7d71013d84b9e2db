"""Dumps of several training steps: in training, rows of different steps never share prefixes, even of one prompt."""

from dataclasses import replace

from tree_rl.inspection.overlap_by_group import forest_of
from tree_rl.inspection.recording import Recording

STEPS = ("step", "global_step", "global_steps", "training_step", "train_step")
"""Columns that number training steps. In logs of agents they may number the calls of an episode instead."""


def separate_steps(recording: Recording) -> Recording:
    """Split each group by training step, if the file has several steps."""
    steps = {row.step for row in recording.rows}
    if len(steps) < 2 or _numbers_calls(recording):
        return recording
    rows = [row if row.step is None else replace(row, group=f"step {row.step} · {row.group}") for row in recording.rows]
    taken = tuple(
        one if one.group is None else replace(one, group=f"{one.group}, each step apart") for one in recording.taken
    )
    return replace(recording, rows=rows, taken=taken)


def _numbers_calls(recording: Recording) -> bool:
    """True if most rows continue a whole row of another step in their group, as an agent's calls do."""
    rows = recording.rows
    order = forest_of(rows).row_order
    continued = 0
    for rank in range(1, len(order.rows)):
        before, after = rows[order.rows[rank - 1]], rows[order.rows[rank]]
        is_whole = order.shared[rank] == order.lengths[rank - 1] < order.lengths[rank]
        continued += bool(is_whole and before.step != after.step and before.group == after.group)
    beyond_first = len(rows) - len({row.group for row in rows})
    return 2 * continued > beyond_first
