"""Hostile sessions beside honest ones, all at once. The script plays 64 of each."""

import json
from pathlib import Path

import pytest
from attack_cases import USERS, CannotBeAnotherUserError, worker

from tree_rl.rollout.sandbox.confinement import HIDING, strictest_means

pytestmark = pytest.mark.skipif(strictest_means() not in HIDING, reason="neither bubblewrap nor mount namespaces")


@pytest.mark.parametrize("user", USERS)
@pytest.mark.timeout(900)
def test_honest_sessions_are_rewarded_and_nothing_is_left(user: str, open_folder: Path) -> None:
    try:
        storm = worker(user, "storm.py", ["8", "8"], open_folder / "made")
    except CannotBeAnotherUserError as error:
        pytest.skip(str(error))
    output, _ = storm.communicate(timeout=850)
    assert storm.returncode == 0
    figures = json.loads(output)
    assert not figures["faults"], figures
