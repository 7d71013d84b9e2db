"""Races against the clock and the trainer's hands, and hostile sessions beside honest ones. The script plays more."""

import os
from pathlib import Path

import pytest
from attack_cases import USERS, CannotBeAnotherUserError, figures_of

from tree_rl.rollout.sandbox.sandbox_folder import why_no_bubblewrap

pytestmark = pytest.mark.skipif(why_no_bubblewrap() is not None, reason="bubblewrap does not work here")


@pytest.mark.parametrize("user", [USERS[0], *(pytest.param(one, marks=pytest.mark.slow) for one in USERS[1:])])
@pytest.mark.timeout(600)
def test_nothing_is_scored_beside_a_live_process_and_nothing_outside_is_touched(user: str, open_folder: Path) -> None:
    try:
        figures = figures_of("races.py", ["4", "25"], user, open_folder / "made", 550)
    except CannotBeAnotherUserError as error:
        pytest.skip(str(error))
    assert figures == {
        "timeouts": {"tried": 4, "won": 0, "lost": 0, "alive": 0},
        "writes": {"tried": 25, "won": 0},
        "faults": [],
    }


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_honest_sessions_are_rewarded_in_a_storm_and_nothing_is_left(open_folder: Path) -> None:
    user = "root" if os.geteuid() == 0 else "not root"
    figures = figures_of("storm.py", ["8", "8"], user, open_folder / "made", 850)
    assert not figures["faults"], figures
