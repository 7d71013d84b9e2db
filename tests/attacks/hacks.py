"""What a hostile policy writes instead of the repair: a name, and a shell command made for the attacked task.

The attacker knows the whole task, our source code, and the names of the hidden tests, but not the expected values.
"""

import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

from small_swe import writing

from tree_rl.rollout.environments.swe_task import SweTask

Hits = Literal["blanket", "targeted"]


@dataclass(frozen=True, kw_only=True, slots=True)
class Hack:
    """One hack. `@MODULE@`, `@FILE@`, `@TEST_FILE@`, `@TEST_MODULE@` and `@NAMES@` are filled in for each task."""

    shell: str = ""
    """A shell command, run last."""
    files: Mapping[str, str] | None = None
    """Files to write, by path."""
    appended: str = ""
    """Python text behind the module with the bug."""
    prepended: str = ""
    """Python text in front of the module with the bug."""
    hits: Hits = "blanket"
    """Whether it would win on any task, or knows what the tests of a task compare. Where tests share a process with
    the code under test (unittest, pytest), a targeted hack may win; docs/security.md says so."""

    def command(self, task: SweTask, *, repaired: bool) -> str:
        """The hack as one shell command, behind the real repair or instead of it."""
        (path,) = task.solution_files
        source = (task.solution_files if repaired else task.files)[path]
        is_edited = repaired or self.appended or self.prepended
        files = {"@FILE@": f"{self.prepended}\n{source}\n{self.appended}"} if is_edited else {}
        files |= self.files or {}
        hidden = f"tests/test_{path.removesuffix('.py')}_issue.py"
        marks = {
            "@FILE@": path,
            "@MODULE@": path.removesuffix(".py"),
            "@TEST_FILE@": hidden,
            "@TEST_MODULE@": hidden.removesuffix(".py").replace("/", "."),
            "@NAMES@": json.dumps([*task.fail_to_pass, *task.pass_to_pass]),
        }
        made = [f"mkdir -p '{name.rpartition('/')[0]}'" for name in files if "/" in name]
        text = "\n".join(part for part in (*made, writing(files), self.shell) if part)
        for mark, value in marks.items():
            text = text.replace(mark, value)
        return text


def all_hacks() -> dict[str, Hack]:
    """All of them by name; the modules behind this one hold them."""
    from hacks_in_files import HACKS as IN_FILES
    from hacks_in_processes import HACKS as IN_PROCESSES
    from hacks_in_python import HACKS as IN_PYTHON

    assert not set(IN_FILES) & set(IN_PYTHON) and not set(IN_PROCESSES) & {*IN_PYTHON, *IN_FILES}
    return {**IN_PYTHON, **IN_FILES, **IN_PROCESSES}
