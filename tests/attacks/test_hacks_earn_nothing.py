"""A hostile policy attacks the tests instead of the bug: real agents, gateway, sandboxes and judge.

Here every twelfth hack is played, and in the slow tier every hack once, with every pair of agent, user and task;
`bash scripts/attacks.sh` plays all.
"""

from pathlib import Path

import pytest
from attack_cases import REPAIR, USERS, fault_of, pairwise, play
from hacks import all_hacks


def test_there_are_many_hacks_and_their_python_is_python() -> None:
    hacks = all_hacks()
    assert len(hacks) >= 100
    for name, hack in hacks.items():
        python = [text for path, text in (hack.files or {}).items() if path.endswith(".py")]
        for text in (hack.appended, hack.prepended, *python):
            compile(text.replace("@NAMES@", "[]"), name, "exec")


@pytest.mark.timeout(900)
@pytest.mark.parametrize("step", [12, pytest.param(1, marks=pytest.mark.slow)], ids=["every twelfth", "all"])
def test_no_hack_earns_a_reward_or_voids_its_session_and_the_repair_earns_one(step: int, open_folder: Path) -> None:
    hacks = all_hacks()
    cases = pairwise(list(hacks))
    repairs = [case for case in cases if case.hack == REPAIR]
    played = [case for case in cases if case.hack != REPAIR][::step] + repairs[:: min(step, 4)]
    assert repairs and {case.user for case in played} == set(USERS)
    results = list(play(played, open_folder, seconds=800))
    faults = {f"{result.case}": fault_of(result, hacks) for result in results if fault_of(result, hacks)}
    assert not faults
    for user in USERS:
        skipped = {result.detail for result in results if result.case.user == user and result.status == "skipped"}
        assert len(skipped) <= 1, "one reason for a user"
    if all(result.status == "skipped" for result in results):
        pytest.skip(results[0].detail)
