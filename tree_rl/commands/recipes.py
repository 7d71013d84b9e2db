"""`tree-rl recipes`: copies recipes, examples and scripts, for users of a wheel. Imports neither torch nor verl."""

import shutil
from pathlib import Path
from typing import Annotated

import typer

import tree_rl
from tree_rl.inspection.files import InputError
from tree_rl.inspection.files.quoting import quoted_path
from tree_rl.inspection.files.terminal import one_line_errors, say
from tree_rl.inspection.files.writing import require_folder_of

FOLDERS = ("constraints", "examples", "recipes", "scripts/cluster", "scripts/ray_token.sh")
"""Folders and files that setup.py puts into a wheel."""

Folder = Annotated[Path, typer.Argument(help="A new or empty folder.")]


def write_recipes(folder: Folder = Path("tree_rl_recipes")) -> None:
    """Write recipes with their tasks, examples, constraints files and cluster scripts to FOLDER."""
    with one_line_errors():
        require_folder_of(folder, "recipes")
        if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
            raise InputError(f"recipes {quoted_path(folder)}: expected a new or empty folder, found one with files")
        source = _source()
        for name in FOLDERS:
            target = folder / name
            try:
                target.parent.mkdir(parents=True, exist_ok=True)
                if (source / name).is_dir():
                    shutil.copytree(source / name, target, ignore=shutil.ignore_patterns("__pycache__"))
                else:
                    shutil.copy(source / name, target)
            except OSError as error:
                raise InputError(f"recipes {quoted_path(folder)}: {error.strerror}: {error.filename}") from error
        say(f"Written to {quoted_path(folder)}. A run on a CPU, in minutes:")
        say(f"  cd {quoted_path(folder)} && bash recipes/grpo/run_qwen3_fsdp2.sh trainer.total_training_steps=2")


def _source() -> Path:
    """The wheel's copy, or the repository of an editable installation."""
    package = Path(tree_rl.__file__).parent
    shipped = package / "shipped"
    return shipped if shipped.is_dir() else package.parent
