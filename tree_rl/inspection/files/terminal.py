"""Output of commands: results on standard output; a user's mistake as one line on standard error and exit code 2."""

import io
import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from typing import NoReturn

import typer

from tree_rl.extras import MissingExtraError
from tree_rl.inspection.files import InputError
from tree_rl.inspection.files.open_file import reason
from tree_rl.inspection.files.quoting import escaped, quoted_path

INPUT_ERROR = 2
"""Exit code for input that cannot be used."""


def say(text: str = "") -> None:
    """Print lines; raises InputError if standard output is closed, full, or without a reader."""
    expected = "standard output: expected to write the whole result"
    # The interpreter sets None if the shell closed the stream.
    if sys.stdout is None:
        raise InputError(f"{expected}, but it is closed; leave it open")
    try:
        typer.echo(text)
    except OSError as error:
        _drop_output()
        raise InputError(f"{expected}: {reason(error)}; write it elsewhere, or read it to its end") from error


def print_mistake(text: str) -> None:
    """Print one line on standard error."""
    with suppress(OSError):
        typer.echo(f"tree-rl: {escaped(text)}", err=True)


def fail(text: str, *, code: int = INPUT_ERROR) -> NoReturn:
    """Print one line on standard error and end the command."""
    print_mistake(text)
    raise typer.Exit(code)


@contextmanager
def one_line_errors() -> Iterator[None]:
    """Turn a user's mistakes and the system's refusals into one line and exit code 2."""
    try:
        yield
    except (InputError, MissingExtraError) as error:
        fail(str(error))
    except OSError as error:
        where = "" if error.filename is None else f"{quoted_path(error.filename)}: "
        fail(f"{where}the system refuses: {reason(error)}; give access or make room")
    except MemoryError as error:
        fail(f"expected to fit into memory: {str(error) or 'no memory left'}; take fewer rows")


def print_anything() -> None:
    """Let standard output and error escape characters that their encoding lacks, such as box characters in Latin-1."""
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="backslashreplace")


def flush_output() -> None:
    """Flush standard output; if that fails, drop the rest so that the interpreter does not complain at exit."""
    if sys.stdout is not None:
        try:
            sys.stdout.flush()
        except OSError:
            _drop_output()


def _drop_output() -> None:
    """Redirect standard output to null: Python flushes a broken stream again at exit, which would fail again."""
    with suppress(OSError, ValueError):
        output = sys.stdout.fileno()
        null = os.open(os.devnull, os.O_WRONLY)
        os.dup2(null, output)
        os.close(null)
