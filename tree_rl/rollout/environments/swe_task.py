"""A software task: a repository, a problem in words, and tests that tell whether it was solved."""

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, fields
from typing import Any, Literal

LogFormat = Literal["signed", "pytest"]


@dataclass(frozen=True, kw_only=True, slots=True)
class SweTask:
    """One task. The agent sees nothing of what enters the sandbox at scoring.

    Raises:
        ValueError: nothing to start from, or no test that decides.
    """

    instance_id: str
    """Name of the task."""
    problem_statement: str
    """What the agent reads."""
    test_command: str
    """Run at scoring; `{tests}` is replaced by `test_targets`, `{runner}` and `{nonce}` by what `signed` needs."""
    test_targets: tuple[str, ...]
    """Files or modules of tests that are run."""
    fail_to_pass: tuple[str, ...]
    """Tests that fail before and must pass."""
    pass_to_pass: tuple[str, ...] = ()
    """Tests that pass before and must still pass."""
    log_format: LogFormat = "signed"
    """How the tests' results are read: `signed` by the nonce of `unittest_runner`, `pytest` from `pytest -rA`."""
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

    def to_row(self) -> dict[str, Any]:
        """The task as a data set stores it: mappings as lists of `{path, content}`.

        A column of a data set has the keys of all its rows, so a mapping from paths would fill with empty entries.
        """
        row = asdict(self)
        for name in ("files", "test_files", "solution_files"):
            row[name] = [{"path": path, "content": text} for path, text in row[name].items()]
        for name in ("test_targets", "fail_to_pass", "pass_to_pass"):
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
        for name in ("files", "test_files", "solution_files"):
            if name in given and not isinstance(given[name], Mapping):
                given[name] = {entry["path"]: entry["content"] for entry in given[name]}
        for name in ("test_targets", "fail_to_pass", "pass_to_pass"):
            given[name] = names(given.get(name, ()))
        missing = [name for name in ("instance_id", "problem_statement", "test_command") if name not in given]
        if missing:
            raise ValueError(f"extra_info.swe.{missing[0]}: expected a text, received nothing")
        return cls(**given)


def names(value: Sequence[str] | str) -> tuple[str, ...]:
    """Test names of a list, an array, or the JSON text in which some data sets keep a list."""
    if isinstance(value, str):
        value = json.loads(value) if value.lstrip().startswith("[") else [value]
    return tuple(str(name) for name in value)
