"""Check the installation, inspect rows, plan a run, time updates, compile kernels.

`inspect`, `plan` and `view` import neither torch nor verl; `bench` and `precompile` import torch, `doctor` everything.
"""

import sys

import typer

from tree_rl.commands.bench import bench_update
from tree_rl.commands.doctor import check_installation
from tree_rl.commands.inspect import inspect_file
from tree_rl.commands.plan import plan_file
from tree_rl.commands.precompile import precompile_kernels
from tree_rl.commands.view import view_file
from tree_rl.inspection.files.terminal import flush_output, one_line_errors, print_anything, print_mistake

CLICK_ERROR: type[typer.BadParameter] = typer.BadParameter.__mro__[2]
"""Base of all mistakes in a command line; typer exports it under no name."""

app = typer.Typer(help="Train LLM agents on prefix trees instead of rows.", no_args_is_help=True, add_completion=False)

app.command("inspect")(inspect_file)
app.command("plan")(plan_file)
app.command("view")(view_file)
app.command("doctor")(check_installation)
app.command("precompile")(precompile_kernels)
app.command("bench")(bench_update)


def main() -> None:
    """Entry point of the console script."""
    print_anything()
    try:
        with one_line_errors():
            status = app(sys.argv[1:] or ["--help"], standalone_mode=False)
    except (typer.Exit, CLICK_ERROR) as error:
        if isinstance(error, CLICK_ERROR):
            print_mistake(f"{error.format_message()} (--help tells what is expected)")
        status = error.exit_code
    except typer.Abort:
        status = 1
    flush_output()
    sys.exit(status)
