"""The recipes' own commands for the tiny model run to their end on a CPU, as printed."""

import subprocess
from pathlib import Path

import pytest
from command_table import RECIPE, treated
from flag_checks import environment
from shell_blocks import ROOT, Command

COMMANDS = [command for command in treated(RECIPE) if not command.variables and len(command.words) == 2]


def test_four_recipes_are_printed() -> None:
    assert {command.document for command in COMMANDS} >= {
        f"recipes/{name}/README.md" for name in ("grpo", "ppo", "sft", "dpo")
    }


@pytest.mark.slow
@pytest.mark.ray
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("command", [pytest.param(command, id=command.text) for command in COMMANDS])
def test_it_runs_as_printed(command: Command, tmp_path: Path) -> None:
    (tmp_path / "recipes").symlink_to(ROOT / "recipes")
    shell = {**environment(), "PYTHON": "python"}
    done = subprocess.run(
        ["bash", "-c", command.text], cwd=tmp_path, env=shell, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-2000:]
