"""Rows of SWE-bench (arXiv 2310.06770), SWE-Gym (arXiv 2412.21139) and SWE-smith (arXiv 2504.21798) as software tasks.

They have the published field names and run in the published container images.
"""

import re
import shlex
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from tree_rl.rollout.environments.swe_task import SweTask, names

DIRECTORY = "/testbed"
ACTIVATE = "export PATH=/opt/miniconda3/envs/testbed/bin:$PATH CONDA_DEFAULT_ENV=testbed"
PYTEST = "python -m pytest --no-header -rA --tb=no -p no:cacheprovider {tests}"
OTHER_RUNNERS = ("django/django", "sympy/sympy", "sphinx-doc/sphinx")
"""Repositories of SWE-bench whose tests need another runner than pytest."""
START_TAG = "task-start"
BUG_PATCH = ".task.patch"


def from_swe_bench(row: Mapping[str, Any]) -> SweTask:
    """Convert a row of SWE-bench.

    Args:
        row: `repo, instance_id, base_commit, problem_statement, test_patch, FAIL_TO_PASS, PASS_TO_PASS`, and
            `image_name` if it is not the standard one.

    Raises:
        ValueError: a field is missing, or pytest does not run the repository's tests.
    """
    row = checked(row, "repo", "instance_id", "base_commit", "problem_statement", "test_patch", "FAIL_TO_PASS")
    if row["repo"] in OTHER_RUNNERS:
        raise ValueError(
            f"{row['instance_id']}: the tests of {row['repo']} are not run by pytest, whose reports alone are "
            f"read; leave out {', '.join(OTHER_RUNNERS)}"
        )
    # Docker refuses double underscores; the published names have this text instead.
    standard = f"swebench/sweb.eval.x86_64.{row['instance_id'].replace('__', '_1776_')}:latest".lower()
    files = tuple(dict.fromkeys(re.findall(r"^diff --git a/.* b/(.*)$", row["test_patch"], re.MULTILINE)))
    targets = tuple(name for name in files if name.endswith(".py"))
    if not targets:
        raise ValueError(
            f"{row['instance_id']}: expected a test_patch with a Python file, whose tests pytest runs, received "
            f"{', '.join(files) or 'no file'}; leave the task out"
        )
    return SweTask(
        instance_id=row["instance_id"],
        problem_statement=row["problem_statement"].strip(),
        image=row.get("image_name") or standard,
        directory=DIRECTORY,
        prelude=ACTIVATE,
        test_command=PYTEST,
        test_targets=targets,
        fail_to_pass=names(row["FAIL_TO_PASS"]),
        pass_to_pass=names(row.get("PASS_TO_PASS") or ()),
        log_format="pytest",
        # One command per file, because it fails for a file that the patch adds.
        before_tests=f"for f in {shlex.join(files)}; do git checkout -q {shlex.quote(row['base_commit'])} -- $f; done",
        test_patch=row["test_patch"],
    )


def from_swe_gym(row: Mapping[str, Any]) -> SweTask:
    """Convert a row of SWE-Gym: as `from_swe_bench`, with other images."""
    task = from_swe_bench(row)
    own = f"xingyaoww/sweb.eval.x86_64.{task.instance_id.replace('__', '_s_')}:latest".lower()
    return replace(task, image=row.get("image_name") or own)


def from_swe_smith(row: Mapping[str, Any]) -> SweTask:
    """Convert a row of SWE-smith, whose `patch` adds the bug to the image's repository at the start.

    Raises `ValueError` if one of `instance_id, image_name, patch, problem_statement, FAIL_TO_PASS` is missing.
    """
    row = checked(row, "instance_id", "image_name", "patch", "problem_statement", "FAIL_TO_PASS")
    fail_to_pass, pass_to_pass = names(row["FAIL_TO_PASS"]), names(row.get("PASS_TO_PASS") or ())
    targets = tuple(dict.fromkeys(name.partition("::")[0] for name in (*fail_to_pass, *pass_to_pass)))
    commit = "git -c user.name=task -c user.email=task@localhost commit -qam 'Start of the task'"
    return SweTask(
        instance_id=row["instance_id"],
        problem_statement=row["problem_statement"].strip(),
        image=row["image_name"],
        directory=DIRECTORY,
        prelude=ACTIVATE,
        files={BUG_PATCH: row["patch"]},
        setup=f"git apply {BUG_PATCH} && rm {BUG_PATCH} && {commit} && git tag {START_TAG}",
        test_command=PYTEST,
        test_targets=targets,
        fail_to_pass=fail_to_pass,
        pass_to_pass=pass_to_pass,
        log_format="pytest",
        before_tests=f"git checkout -q {START_TAG} -- {shlex.join(targets)}",
    )


def checked(row: Mapping[str, Any], *needed: str) -> Mapping[str, Any]:
    """Return the row if it has these fields and a problem statement; raise `ValueError` otherwise."""
    missing = [name for name in needed if row.get(name) is None]
    if missing:
        raise ValueError(
            f"row {row.get('instance_id', '?')}: expected the field {missing[0]!r}, received {sorted(row)}"
        )
    if not row["problem_statement"].strip():
        raise ValueError(
            f"row {row['instance_id']}: expected a problem in words, received an empty problem_statement; many rows of "
            "SWE-smith have none: leave them out"
        )
    return row
