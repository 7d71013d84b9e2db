"""What commands say: results on standard output, a mistake as one line on standard error with exit code 2."""

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
"""Exit code when what the user gave cannot be used."""


def say(text: str = "") -> None:
    """Print lines.

    Raises:
        InputError: standard output is full or its reader is gone.
    """
    expected = "standard output: expected to write the whole result"
    # What the interpreter sets where the shell closed the stream.
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
    """Turn mistakes in what the user gave, and what the machine refuses, into one line and exit code 2."""
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
    """Let standard output and error escape what their encoding lacks, as the box characters of drawings in Latin-1."""
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="backslashreplace")


def flush_output() -> None:
    """Write what is left; output that cannot take it is dropped without the interpreter's own complaint."""
    if sys.stdout is not None:
        try:
            sys.stdout.flush()
        except OSError:
            _drop_output()


def _drop_output() -> None:
    """Python writes the rest of a broken stream at its end, and would fail there again."""
    with suppress(OSError, ValueError):
        output = sys.stdout.fileno()
        null = os.open(os.devnull, os.O_WRONLY)
        os.dup2(null, output)
        os.close(null)
