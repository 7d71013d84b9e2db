"""The published benchmarks as environments: `extra_info.row` is a published row in JSON."""

import json
from collections.abc import Mapping
from typing import Any, ClassVar

from tree_rl.rollout.environments.benchmarks import r2e
from tree_rl.rollout.environments.benchmarks.r2e import from_r2e
from tree_rl.rollout.environments.benchmarks.terminal_bench import from_terminal_bench
from tree_rl.rollout.environments.published_tasks import from_swe_bench, from_swe_gym, from_swe_smith
from tree_rl.rollout.environments.swe import SweEnvironment
from tree_rl.rollout.environments.swe_task import SweTask

SWE_BENCH = ("repo", "instance_id", "base_commit", "problem_statement", "test_patch", "FAIL_TO_PASS", "PASS_TO_PASS")


class PublishedEnvironment(SweEnvironment):
    """A software task of a published benchmark."""

    name: ClassVar[str]
    """Name of the benchmark in the config."""
    columns: ClassVar[tuple[str, ...]]
    """Columns that a published file must have; empty for a folder of tasks."""

    @staticmethod
    def read(row: Mapping[str, Any]) -> SweTask:
        """Make a task of a published row. Raises `ValueError` if it cannot be judged."""
        raise NotImplementedError

    def task_of(self, task: Mapping[str, Any]) -> SweTask:
        """Read a row's published task. Raises `ValueError` if there is none, or it cannot be judged."""
        if not isinstance(task.get("row"), str):
            raise ValueError(
                f"extra_info.row: {self.name} expects a published row in JSON, received {sorted(task)}; make the data "
                f"set with python -m tree_rl.rollout.environments.benchmarks.published_files {self.name} FILE OUT"
            )
        return type(self).read(json.loads(task["row"]))


class SweBenchVerified(PublishedEnvironment):
    """SWE-bench, its subset Verified, and others with its schema."""

    name = "swe_bench_verified"
    read = staticmethod(from_swe_bench)
    columns = SWE_BENCH


class SweGym(PublishedEnvironment):
    """SWE-Gym: SWE-bench's schema with other images."""

    name = "swe_gym"
    read = staticmethod(from_swe_gym)
    columns = SWE_BENCH


class SweSmith(PublishedEnvironment):
    """SWE-smith: the bug is the row's patch."""

    name = "swe_smith"
    read = staticmethod(from_swe_smith)
    columns = ("instance_id", "image_name", "patch", "problem_statement", "FAIL_TO_PASS", "PASS_TO_PASS")


class R2E(PublishedEnvironment):
    """R2E-Gym: every test must have the row's verdict."""

    name = "r2e"
    read = staticmethod(from_r2e)
    columns = r2e.COLUMNS


class TerminalBench(PublishedEnvironment):
    """Terminal-Bench: the task's verifier writes the reward."""

    name = "terminal_bench"
    read = staticmethod(from_terminal_bench)
    columns = ()


BENCHMARKS: Mapping[str, type[PublishedEnvironment]] = {
    one.name: one for one in (SweBenchVerified, SweSmith, SweGym, R2E, TerminalBench)
}
