"""Every small software task is a task: its tests fail, the reference solution passes them, nothing else does."""

import json
import subprocess
import sys
from pathlib import Path

import pandas as pd
import pytest
from small_swe import GENERATOR, all_tasks, score_after, writing

from tree_rl.rollout.environments.swe_task import SweTask


def test_there_are_tasks_of_several_sizes() -> None:
    tasks = all_tasks().values()
    assert len(tasks) >= 30
    sizes = {sum("/" not in path for path in task.files) for task in tasks}
    assert {1, 2, 3} <= sizes and max(sizes) <= 4
    assert all(task.fail_to_pass and task.pass_to_pass for task in tasks)


@pytest.mark.parametrize("name", all_tasks())
def test_an_unrelated_edit_does_not_pass_and_the_reference_solution_does(name: str) -> None:
    task = all_tasks()[name]
    sources = [path for path in task.files if "/" not in path]
    reward, report = score_after(task, "".join(f"echo '# looked at' >> {path}\n" for path in sources))
    assert reward == 0.0
    assert report.fail_to_pass == (0, len(task.fail_to_pass)), "every hidden test fails before"
    assert report.pass_to_pass == (len(task.pass_to_pass),) * 2, "every visible test passes before"
    reward, report = score_after(task, writing(dict(task.solution_files)))
    assert reward == 1.0
    assert report.fail_to_pass == (len(task.fail_to_pass),) * 2


def test_the_statement_does_not_contain_the_solution() -> None:
    for task in all_tasks().values():
        for path, right in task.solution_files.items():
            added = {line.strip() for line in right.splitlines()} - {x.strip() for x in task.files[path].splitlines()}
            assert not any(line in task.problem_statement for line in added if len(line) > 12), task.instance_id


def test_rows_are_the_same_in_every_run_and_survive_parquet(tmp_path: Path) -> None:
    for folder in ("a", "b"):
        subprocess.run([sys.executable, GENERATOR, tmp_path / folder], check=True, capture_output=True)
    assert (tmp_path / "a" / "tasks.jsonl").read_bytes() == (tmp_path / "b" / "tasks.jsonl").read_bytes()
    rows = [json.loads(line) for line in (tmp_path / "a" / "tasks.jsonl").read_text().splitlines()]
    stored = pd.concat([pd.read_parquet(tmp_path / "a" / f"{split}.parquet") for split in ("train", "test")])
    assert len(stored) == len(rows) == len(all_tasks())
    for _, row in stored.iterrows():
        task = SweTask.from_row(row["extra_info"]["swe"])
        assert task == all_tasks()[task.instance_id]
        assert task.problem_statement in row["prompt"][1]["content"]


def test_a_task_with_a_misspelt_field_is_named() -> None:
    row = next(iter(all_tasks().values())).to_row()
    with pytest.raises(ValueError, match=r"extra_info\.swe\.tset_command"):
        SweTask.from_row({**row, "tset_command": "x"})
    with pytest.raises(ValueError, match="at least one test in fail_to_pass"):
        SweTask.from_row({**row, "fail_to_pass": []})
    with pytest.raises(ValueError, match="`files` or an `image`"):
        SweTask.from_row({**row, "files": []})
