"""With canaries and probes among them, the tests of sound code say what they say without, and every canary fails."""

import random
import subprocess
import sys
from pathlib import Path

from judged_tasks import SOUND, UNITTEST

from tree_rl.rollout.environments import suite_judge
from tree_rl.rollout.environments.canaries.planting import plant
from tree_rl.rollout.environments.swe_reports import passed_tests, verdicts_of

RUNNER = Path(suite_judge.__file__).with_name(suite_judge.UNITTEST_RUNNER)


def verdicts(folder: Path, targets: tuple[str, ...]) -> dict[str, set[str]]:
    argv = [sys.executable, "-I", "-B", str(RUNNER), *targets]
    done = subprocess.run(argv, cwd=folder, capture_output=True, text=True, check=True, timeout=120)
    return verdicts_of(done.stdout, log_format="unittest")


def test_sound_code_passes_and_canaries_fail(tmp_path: Path) -> None:
    folder, sources, targets = tmp_path, UNITTEST.test_files, UNITTEST.test_targets
    (folder / "tests").mkdir()
    for path, text in {"durations.py": SOUND, **sources}.items():
        (folder / path).write_text(text)
    sound = passed_tests(verdicts(folder, targets))
    assert sound == {*UNITTEST.fail_to_pass, *UNITTEST.pass_to_pass}
    for seed in range(6):
        rng = random.Random(seed)
        planted = plant(sources, targets=targets, counting=sorted(sound), is_pytest=False, rng=rng)
        assert len(planted.names) >= 8
        for path, text in planted.files.items():
            (folder / path).write_text(text)
        said = verdicts(folder, planted.targets)
        assert planted.doubt(said) is None, said
        assert sound <= passed_tests(said), said


MIXED = """\
import unittest


class Checks:
    def test_order_of_parts(self):
        self.assertEqual(self.parts(3661), [1, 1, 1])

    def test_value_of_nothing(self):
        self.assertEqual(self.parts(0), [0, 0, 0])


class TestParts(Checks, unittest.TestCase):
    from durations import parts

    parts = staticmethod(parts)

    def test_large_value(self):
        self.assertEqual(self.parts(3600), [1, 0, 0])
"""


def test_classes_that_are_mixed_in_take_nothing(tmp_path: Path) -> None:
    (tmp_path / "tests").mkdir()
    (tmp_path / "durations.py").write_text(SOUND)
    (tmp_path / "tests/test_mixed.py").write_text(MIXED)
    sound = passed_tests(verdicts(tmp_path, ("tests.test_mixed",)))
    assert len(sound) == 3
    planted = plant(
        {"tests/test_mixed.py": MIXED}, targets=["tests.test_mixed"], counting=sorted(sound), is_pytest=False
    )
    for path, text in planted.files.items():
        (tmp_path / path).write_text(text)
    said = verdicts(tmp_path, planted.targets)
    assert planted.doubt(said) is None, said
    assert sound <= passed_tests(said), said
