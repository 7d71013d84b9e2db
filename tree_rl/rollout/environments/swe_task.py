"""A software task: a repository, a problem statement, and tests that decide whether it was solved."""

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, fields
from typing import Any, Literal

from tree_rl.option_types import check_type
from tree_rl.rollout.environments.cases import Case

LogFormat = Literal["cases", "unittest", "pytest", "reward_file"]
PATHS = ("files", "test_files", "solution_files")
NAMES = ("test_targets", "fail_to_pass", "pass_to_pass", "must_fail", "reward_files")


@dataclass(frozen=True, kw_only=True, slots=True)
class SweTask:
    """One task. The agent does not see what is written only at scoring.

    Raises `ValueError` without a repository or a deciding test, and for fields that do not fit `log_format`.
    """

    instance_id: str
    """Name of the task."""
    problem_statement: str
    """Description of the problem for the agent."""
    fail_to_pass: tuple[str, ...]
    """Tests that fail before and must pass."""
    pass_to_pass: tuple[str, ...] = ()
    """Tests that pass before and must still pass."""
    must_fail: tuple[str, ...] = ()
    """Tests that fail with the reference solution too, and must not pass."""
    log_format: LogFormat = "unittest"
    """How the tests run and report. `cases`: programs, whose values we compare. `unittest`: modules, run by
    `unittest_runner`. `pytest`: the output of `pytest -rA`. `reward_file`: a file that `test_command` writes."""
    cases: tuple[Case, ...] = ()
    """Programs and their expected results, for `cases`; their names are the tests' names."""
    test_command: str = ""
    """Command at scoring, except for `cases`; `{tests}` becomes `test_targets`, `{runner}` unittest's program."""
    reward_files: tuple[str, ...] = ()
    """Paths where `test_command` may write the reward, for `reward_file`: a number, or JSON `{"reward": number}`."""
    test_targets: tuple[str, ...] = ()
    """Targets of the test command: modules for unittest, files for pytest."""
    files: Mapping[str, str] = field(default_factory=dict)
    """Contents of the repository by path, if no image contains it."""
    image: str | None = None
    """Container image with the repository."""
    directory: str | None = None
    """Path of the repository in the image."""
    prelude: str = ""
    """Shell text before every command, for example to activate an environment."""
    setup: str = ""
    """Command at the start, in the repository."""
    before_tests: str = ""
    """Command at scoring, before the tests are written: reverts the agent's changes to them."""
    test_files: Mapping[str, str] = field(default_factory=dict)
    """Contents, by path, of the files written at scoring."""
    test_patch: str = ""
    """Patch applied with `git apply` at scoring."""
    solution_files: Mapping[str, str] = field(default_factory=dict)
    """Contents, by path, of the reference solution; never written into the sandbox."""

    def __post_init__(self) -> None:
        if not self.files and self.image is None:
            raise ValueError(f"task {self.instance_id}: expected `files` or an `image` that holds the repository")
        if not self.fail_to_pass:
            raise ValueError(f"task {self.instance_id}: expected at least one test in fail_to_pass")
        check_type(f"task {self.instance_id}: log_format", self.log_format, LogFormat)
        unknown = {*self.fail_to_pass, *self.pass_to_pass} - {case.name for case in self.cases}
        if self.log_format == "cases" and unknown:
            raise ValueError(f"task {self.instance_id}: expected a case for every test, found none for {min(unknown)}")
        if (self.log_format == "reward_file") != bool(self.reward_files):
            raise ValueError(
                f"task {self.instance_id}: expected reward_files with log_format=reward_file and no other, received "
                f"{self.reward_files} with {self.log_format}"
            )
        needed = {"unittest": ("{runner}", "{tests}"), "pytest": ("{tests}",)}.get(self.log_format, ())
        if any(self.test_command.count(place) != 1 for place in needed) or (needed and not self.test_targets):
            raise ValueError(
                f"task {self.instance_id}: log_format={self.log_format} expects test_targets, and a test_command with "
                f"{' and '.join(needed)}, received {self.test_command!r}"
            )

    def to_row(self) -> dict[str, Any]:
        """The task as a row of a data set, with mappings as lists of `{path, content}`.

        A column of a data set has the keys of all its rows, so mappings would get empty entries.
        """
        row = asdict(self)
        for name in PATHS:
            row[name] = [{"path": path, "content": text} for path, text in row[name].items()]
        for name in (*NAMES, "cases"):
            row[name] = list(row[name])
        return row

    @classmethod
    def from_row(cls, row: Mapping[str, Any]) -> "SweTask":
        """Read a row of `to_row`, whose lists may be arrays. Raises `ValueError` for a missing or unknown field."""
        known = {entry.name for entry in fields(cls)}
        unknown = sorted(set(row) - known)
        if unknown:
            raise ValueError(f"extra_info.swe.{unknown[0]}: no such field; known are {', '.join(sorted(known))}")
        given: dict[str, Any] = {key: value for key, value in row.items() if value is not None}
        for name in PATHS:
            if name in given and not isinstance(given[name], Mapping):
                given[name] = {entry["path"]: entry["content"] for entry in given[name]}
        for name in NAMES:
            given[name] = names(given.get(name, ()))
        given["cases"] = tuple(Case(**case) for case in given.get("cases", ()))
        missing = [name for name in ("instance_id", "problem_statement") if name not in given]
        if missing:
            raise ValueError(f"extra_info.swe.{missing[0]}: expected a text, received nothing")
        return cls(**given)


def names(value: Sequence[str] | str) -> tuple[str, ...]:
    """Test names of a list, an array, or JSON text, in which some data sets store lists."""
    if isinstance(value, str):
        value = json.loads(value) if value.lstrip().startswith("[") else [value]
    return tuple(str(name) for name in value)
