"""A software task: a repository, a problem in words, and tests that tell whether it was solved."""

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, fields
from typing import Any, Literal, get_args

from tree_rl.rollout.environments.cases import Case

LogFormat = Literal["cases", "unittest", "pytest", "reward_file"]
PATHS = ("files", "test_files", "solution_files")
NAMES = ("test_targets", "fail_to_pass", "pass_to_pass", "must_fail", "reward_files")


@dataclass(frozen=True, kw_only=True, slots=True)
class SweTask:
    """One task. The agent sees nothing of what enters the sandbox of the judge.

    Raises:
        ValueError: nothing to start from, no test that decides, or a format without what it needs.
    """

    instance_id: str
    """Name of the task."""
    problem_statement: str
    """What the agent reads."""
    fail_to_pass: tuple[str, ...]
    """Tests that fail before and must pass."""
    pass_to_pass: tuple[str, ...] = ()
    """Tests that pass before and must still pass."""
    must_fail: tuple[str, ...] = ()
    """Tests that fail with the reference solution too, and must not pass."""
    log_format: LogFormat = "unittest"
    """What decides: `cases` by themselves, modules of unittest run by `unittest_runner`, `pytest -rA`, or a file that
    `test_command` writes."""
    cases: tuple[Case, ...] = ()
    """Calls and what they must return, for `cases`; the tests' names are theirs."""
    test_command: str = ""
    """Run at scoring, not for `cases`; `{tests}` becomes `test_targets`, and `{runner}` the program of `unittest`."""
    reward_files: tuple[str, ...] = ()
    """Where `test_command` may write the reward, for `reward_file`: a number, or JSON `{"reward": number}`."""
    test_targets: tuple[str, ...] = ()
    """Modules of tests that are run, as unittest names them; for pytest files."""
    files: Mapping[str, str] = field(default_factory=dict)
    """Path -> content, the repository where no image holds it."""
    image: str | None = None
    """Container image that holds the repository."""
    directory: str | None = None
    """The repository's place in the image."""
    prelude: str = ""
    """Shell text in front of every command, such as what activates an environment."""
    setup: str = ""
    """Command at the start, in the repository."""
    before_tests: str = ""
    """Command at scoring, before the tests are written: removes what the agent did to them."""
    test_files: Mapping[str, str] = field(default_factory=dict)
    """Path -> content, written at scoring."""
    test_patch: str = ""
    """Applied with `git apply` at scoring."""
    solution_files: Mapping[str, str] = field(default_factory=dict)
    """Path -> content of the reference solution; never written into the sandbox."""

    def __post_init__(self) -> None:
        if not self.files and self.image is None:
            raise ValueError(f"task {self.instance_id}: expected `files` or an `image` that holds the repository")
        if not self.fail_to_pass:
            raise ValueError(f"task {self.instance_id}: expected at least one test in fail_to_pass")
        if self.log_format not in get_args(LogFormat):
            raise ValueError(
                f"task {self.instance_id}: expected log_format to be one of {', '.join(get_args(LogFormat))}, received "
                f"{self.log_format!r}"
            )
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
        """The task as a data set stores it: mappings as lists of `{path, content}`.

        A column of a data set has the keys of all its rows, so a mapping from paths would fill with empty entries.
        """
        row = asdict(self)
        for name in PATHS:
            row[name] = [{"path": path, "content": text} for path, text in row[name].items()]
        for name in (*NAMES, "cases"):
            row[name] = list(row[name])
        return row

    @classmethod
    def from_row(cls, row: Mapping[str, Any]) -> "SweTask":
        """Read what `to_row` made, also after a data set turned its lists into arrays.

        Raises:
            ValueError: a field is missing or unknown; it is named.
        """
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
    """Test names of a list, an array, or the JSON text in which some data sets keep a list."""
    if isinstance(value, str):
        value = json.loads(value) if value.lstrip().startswith("[") else [value]
    return tuple(str(name) for name in value)
