"""Every command of the documents runs as printed, or its flags are those of the program that it starts."""

import json
import shutil
import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest
from command_table import RECIPE, ROWS, RUNS, SLOW, TREATMENTS, row_of, treated
from flag_checks import (
    check_docker,
    check_option_names,
    check_pip,
    check_pytest,
    check_script,
    check_tree_rl,
    complaints_of_parsers,
    environment,
    starts_a_python_program,
)
from shell_blocks import ALL, DOCUMENTS, ROOT, Command, inline_commands

from tree_rl.cost.model_sizes import MODEL_SIZES

LINKED = ("benchmarks", "examples", "recipes", "scripts", "tests", "tree_rl", "kernels")
FIRST = ("examples/write_qwen_tokenizer.py",)
"""Programs whose files other commands read."""
CHECKS: dict[str, Callable[[Command], None]] = {
    "bash": check_script,
    "docker": check_docker,
    "pip": check_pip,
    "pytest": check_pytest,
    "sbatch": check_script,
    "tree-rl": check_tree_rl,
}
"""By a command's first word."""


def named(commands: list[Command]) -> list[object]:
    return [pytest.param(command, id=str(command)[:100]) for command in commands]


def is_a_job(command: Command) -> bool:
    """Whether Hydra reads the command's arguments."""
    words, is_script = command.words, command.words[0] == "bash" and command.words[1].startswith("recipes/")
    return is_script or "=" in words[0] or words[2:3] == ("tree_rl.train",)


def test_every_command_has_a_row_and_every_row_a_command_and_a_time() -> None:
    without = [str(command) for command in ALL if command.words and row_of(command) is None]
    assert not without, "docs/commands.md has no row for these"
    used = {row_of(command) for command in ALL if command.words}
    inline = [text for path in DOCUMENTS for text in inline_commands(path)]
    unused = [row for row in ROWS if row not in used and not any(text.startswith(row.start) for text in inline)]
    assert not unused and all(row.time for row in ROWS)


@pytest.mark.parametrize("path", [path for path in DOCUMENTS if inline_commands(path)], ids=lambda path: path.name)
def test_commands_inside_sentences_exist(path: Path) -> None:
    for text in inline_commands(path):
        words = text.split()
        if words[0] == "tree-rl":
            check_option_names(words)
        scripts = [word for word in words[1:] if word.endswith((".sh", ".py")) and "/" in word]
        assert all((ROOT / script).is_file() or not script[0].isalnum() for script in scripts), text


def test_tests_that_rows_name_exist_and_run_the_command() -> None:
    for row in ROWS:
        if row.treatment not in TREATMENTS:
            test = ROOT / row.treatment
            folder = "".join(path.read_text(encoding="utf-8") for path in test.parent.glob("*.py"))
            words = row.start.split()
            # A module behind -m, a program's file, or a command of tree-rl.
            program = words[2].rpartition(".")[2] if words[1:2] == ["-m"] else Path(words[len(words) > 1]).stem
            assert test.is_file() and program in folder, row


@pytest.mark.parametrize("command", named([c for c in treated() if c.words[0] in CHECKS]))
def test_flags_variables_and_files_exist(command: Command) -> None:
    CHECKS[command.words[0]](command)


@pytest.mark.slow
def test_programs_take_their_flags() -> None:
    commands = [command for command in treated() if starts_a_python_program(command.words)]
    # Those that run need no parser; some read their arguments by themselves.
    commands = [command for command in commands if row_of(command).treatment not in (RUNS, SLOW)]  # type: ignore[union-attr]
    assert len(commands) > 20
    complaints = complaints_of_parsers(commands)
    assert not {str(command): text for command, text in complaints.items() if text}


@pytest.mark.slow
@pytest.mark.parametrize("command", named([c for c in treated() if is_a_job(c)]))
def test_jobs_compose_and_pass_the_check_before_ray(command: Command, tmp_path: Path) -> None:
    from jobs import check_job_of

    check_job_of(command, tmp_path)


@pytest.fixture(scope="module")
def reader(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The root of a checkout, as a reader has it, with folders of its own for what commands write."""
    folder = tmp_path_factory.mktemp("reader")
    for name in LINKED:
        (folder / name).symlink_to(ROOT / name)
    # Commands write figures beside those of the documents.
    shutil.copytree(ROOT / "docs", folder / "docs")
    (folder / "Qwen3-8B").mkdir()
    (folder / "Qwen3-8B" / "config.json").write_text(json.dumps(MODEL_SIZES["8b"].config))
    return folder


@pytest.fixture(scope="module")
def with_tokenizer(reader: Path) -> Path:
    """The same root, with what the first programs write."""
    for command in treated(SLOW):
        if set(FIRST) & set(command.words):
            run(command, reader)
    return reader


def run(command: Command, folder: Path, **variables: str) -> str:
    """What a command prints. Fails if it ends with another status than 0."""
    shell = {**environment(), **variables}
    done = subprocess.run(["bash", "-c", command.text], cwd=folder, env=shell, capture_output=True, text=True)
    assert done.returncode == 0, f"{command}\n{done.stdout[-2000:]}{done.stderr[-2000:]}"
    return done.stdout


@pytest.mark.parametrize("command", named(treated(RUNS)))
def test_it_runs_as_printed(command: Command, reader: Path) -> None:
    assert run(command, reader).strip()


@pytest.mark.slow
@pytest.mark.timeout(1200)
@pytest.mark.parametrize("command", named([c for c in treated(SLOW) if not set(FIRST) & set(c.words)]))
def test_it_runs_as_printed_slowly(command: Command, with_tokenizer: Path) -> None:
    run(command, with_tokenizer)


RECIPES = [command for command in treated(RECIPE) if not command.variables and len(command.words) == 2]
"""For the tiny model."""


def test_four_recipes_are_printed() -> None:
    printed = {f"recipes/{name}/README.md" for name in ("grpo", "ppo", "sft", "dpo")}
    assert {command.document for command in RECIPES} >= printed


@pytest.mark.slow
@pytest.mark.ray
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("command", [pytest.param(command, id=command.text) for command in RECIPES])
def test_a_recipe_runs_on_a_cpu_as_printed(command: Command, tmp_path: Path) -> None:
    (tmp_path / "recipes").symlink_to(ROOT / "recipes")
    run(command, tmp_path, PYTHON="python")


@pytest.mark.slow
@pytest.mark.parametrize("name", ["trials", "calls"])
def test_drawings_of_the_documents_are_those_of_the_command(name: str, with_tokenizer: Path) -> None:
    (command,) = [command for command in treated(SLOW) if f"{name}.svg" in command.words]
    run(command, with_tokenizer)
    shown = ROOT / "docs" / "images" / "how_it_works" / f"{name}.svg"
    assert (with_tokenizer / f"{name}.svg").read_bytes() == shown.read_bytes()
