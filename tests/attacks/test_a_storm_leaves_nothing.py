"""Hostile sessions beside honest ones, all at once. The script plays 64 of each."""

import json
import os
from pathlib import Path

import pytest
from attack_cases import worker

from tree_rl.rollout.sandbox.sandbox_folder import why_no_bubblewrap

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(why_no_bubblewrap() is not None, reason="bubblewrap does not work here"),
]


@pytest.mark.timeout(900)
def test_honest_sessions_are_rewarded_and_nothing_is_left(open_folder: Path) -> None:
    storm = worker("root" if os.geteuid() == 0 else "not root", "storm.py", ["8", "8"], open_folder / "made")
    output, _ = storm.communicate(timeout=850)
    assert storm.returncode == 0
    figures = json.loads(output)
    assert not figures["faults"], figures
