"""Races against the clock and against the trainer's hands in the sandbox's folder. The script plays more of them."""

import json
from pathlib import Path

import pytest
from attack_cases import USERS, CannotBeAnotherUserError, worker

from tree_rl.rollout.sandbox.sandbox_folder import why_no_bubblewrap

pytestmark = pytest.mark.skipif(why_no_bubblewrap() is not None, reason="bubblewrap does not work here")


@pytest.mark.parametrize("user", [USERS[0], *(pytest.param(one, marks=pytest.mark.slow) for one in USERS[1:])])
@pytest.mark.timeout(600)
def test_nothing_is_scored_beside_a_live_process_and_nothing_outside_is_touched(user: str, open_folder: Path) -> None:
    try:
        racing = worker(user, "races.py", ["4", "25"], open_folder / "made")
    except CannotBeAnotherUserError as error:
        pytest.skip(str(error))
    output, _ = racing.communicate(timeout=550)
    assert racing.returncode == 0
    assert json.loads(output) == {
        "timeouts": {"tried": 4, "won": 0, "lost": 0, "alive": 0},
        "writes": {"tried": 25, "won": 0},
        "faults": [],
    }
