"""The quickstart's task: look into three stock files with real commands and write their numbers into a report.

The reward looks at the report on disk only, whatever the agent said on its way there.
"""

import random
from collections.abc import Mapping, Sequence
from typing import Any

from tree_rl.rollout.environments import Outcome, ShellEnvironment
from tree_rl.rollout.sandbox.sandbox import SandboxOptions
from tree_rl.rollout.sandbox.sandbox_folder import why_no_bubblewrap

ROOMS = ("attic", "barn", "cellar", "garden", "hall", "kitchen", "porch", "shed")
REPORT = "report.txt"
SYSTEM_PROMPT = "Answer from the files."
ROOMS_ASKED = 3


class StockEnvironment(ShellEnvironment):
    """A folder with one stock file for each room, a shell, and the graded report.

    Unconfined where bubblewrap does not work: this tiny model learned from our own sessions alone.
    """

    def __init__(self) -> None:
        super().__init__(SandboxOptions(unconfined=why_no_bubblewrap() is not None))

    async def score(self, outcome: Outcome) -> float:
        """Grade the report, in [0, 1]."""
        return grade_report(await self.sandbox.read(REPORT), self.task["rooms"], self.task["files"])


def draw_task(random_source: random.Random) -> dict[str, Any]:
    """Draw `files` (file name to content, of all eight rooms) and `rooms` (the three to report, in order)."""
    return {
        "files": {f"{room}.txt": f"stock: {room} {random_source.randrange(10)}\n" for room in ROOMS},
        "rooms": random_source.sample(ROOMS, ROOMS_ASKED),
    }


def first_messages(task: Mapping[str, Any]) -> list[dict[str, str]]:
    """Return the conversation's start: system and user message."""
    return [
        {"role": "system", "content": SYSTEM_PROMPT},
        {"role": "user", "content": f"Report {' '.join(task['rooms'])}."},
    ]


def grade_report(report: str | None, rooms: Sequence[str], files: Mapping[str, str]) -> float:
    """Grade what the agent left on disk.

    Args:
        report: Content of the report, `room number room number ...`; None when the agent wrote none.
        rooms: Rooms to report.
        files: The stock files, `stock: room number` each.

    Returns:
        Share of the rooms that are reported with their true number, in [0, 1]; a room's first mention counts.
    """
    words = [] if report is None else report.split()
    reported: dict[str, str] = {}
    for room, number in zip(words[::2], words[1::2], strict=False):
        reported.setdefault(room, number)
    return sum(reported.get(room) == files[f"{room}.txt"].split()[-1] for room in rooms) / len(rooms)
