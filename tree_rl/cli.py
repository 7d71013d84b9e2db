"""The command `tree-rl`: checks the installation, inspects rows, plans a run, times updates, compiles kernels.

`inspect`, `plan` and `view` import neither torch nor verl; `bench` and `precompile` import torch, `doctor` everything.
"""

import shlex
import sys
from collections.abc import Sequence
from typing import Annotated

import typer

from tree_rl import __version__
from tree_rl.commands.bench import bench_update
from tree_rl.commands.doctor import check_installation
from tree_rl.commands.inspect import inspect_file
from tree_rl.commands.plan import plan_file
from tree_rl.commands.precompile import precompile_kernels
from tree_rl.commands.recipes import write_recipes
from tree_rl.commands.report import report_run
from tree_rl.commands.row_options import WORDS
from tree_rl.commands.view import view_file
from tree_rl.inspection.files.terminal import fail, flush_output, one_line_errors, print_anything, print_mistake, say

CLICK_ERROR: type[typer.BadParameter] = typer.BadParameter.__mro__[2]
"""Base class of click's command-line errors, which typer does not export."""

app = typer.Typer(no_args_is_help=True, rich_markup_mode="markdown")

app.command("inspect", epilog=WORDS)(inspect_file)
app.command("plan", epilog=WORDS)(plan_file)
app.command("view", epilog=WORDS)(view_file)
app.command("report")(report_run)
app.command("doctor")(check_installation)
app.command("precompile")(precompile_kernels)
app.command("bench")(bench_update)
app.command("recipes")(write_recipes)


def print_version(wanted: bool) -> None:
    """Print the version and exit if `--version` is given."""
    if wanted:
        say(f"tree_rl {__version__}")
        raise typer.Exit


Version = Annotated[
    bool, typer.Option("--version", callback=print_version, is_eager=True, help="Print the version and exit.")
]


@app.callback()
def take_common_options(version: Version = False) -> None:
    """Train LLM agents on prefix trees instead of rows."""


RENAMED = {"estimate": ["inspect"], "top": ["report", "--watch"]}
"""New names of commands of earlier releases."""


def refuse_old_name(given: Sequence[str]) -> None:
    """If a command was renamed, print its new form and exit."""
    if given and given[0] in RENAMED:
        instead = shlex.join(["tree-rl", *RENAMED[given[0]], *(word for word in given[1:] if word != "--once")])
        fail(f"{given[0]} has another name now; type: {instead}")


def received(error: BaseException) -> str:
    """The value of an option that pydantic refuses, which typer's message leaves out; empty if the message has it."""
    cause = error.__cause__
    if not isinstance(cause, ValueError) or not hasattr(cause, "errors"):
        return ""
    first = cause.errors()[0]
    value = str(first["input"])
    return "" if repr(value) in first["msg"] else f", received {value}"


def main() -> None:
    """Entry point of the console script."""
    print_anything()
    try:
        refuse_old_name(sys.argv[1:])
        if "" in sys.argv[1:]:
            fail("an argument is empty: is a variable of the shell not set?")
        with one_line_errors():
            status = app(sys.argv[1:] or ["--help"], prog_name="tree-rl", standalone_mode=False)
    except (typer.Exit, CLICK_ERROR) as error:
        if isinstance(error, CLICK_ERROR):
            print_mistake(f"{error.format_message()}{received(error)} (--help tells what is expected)")
        status = error.exit_code
    except typer.Abort:
        status = 1
    flush_output()
    sys.exit(status)
