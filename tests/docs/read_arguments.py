"""Program: reads JSON, a list of {target, arguments, paths}; writes the list of what each program's parser says.

Every program runs until its own argparse parser has read its command line; null stands for a line that it takes.
"""

import argparse
import contextlib
import io
import json
import runpy
import sys
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[2]
parse_args = argparse.ArgumentParser.parse_args


class HasParsedError(BaseException):
    """The program's parser took its command line."""


def parse_and_stop(parser: argparse.ArgumentParser, *given: Any) -> None:
    parse_args(parser, *given)
    raise HasParsedError


def complaint(target: str, arguments: list[str], paths: list[str]) -> str | None:
    """What the program says about its arguments; None if it takes them."""
    sys.argv = [target, *arguments]
    script = ROOT / target
    folder = [str(script if script.is_dir() else script.parent)] if script.exists() else []
    before, imported, said = list(sys.path), set(sys.modules), io.StringIO()
    sys.path[:0] = [*folder, *paths]
    try:
        with contextlib.redirect_stderr(said), contextlib.redirect_stdout(io.StringIO()):
            if script.exists():
                runpy.run_path(str(script), run_name="__main__")
            else:
                runpy.run_module(target, run_name="__main__", alter_sys=True)
    except HasParsedError:
        return None
    except SystemExit:
        return said.getvalue().strip().splitlines()[-1]
    finally:
        sys.path[:] = before
        # Programs have modules of the same names.
        for name in set(sys.modules) - imported:
            file = getattr(sys.modules[name], "__file__", None) or ""
            if file.startswith((f"{ROOT}/benchmarks/", f"{ROOT}/recipes/")):
                del sys.modules[name]
    return "ended before it parsed its arguments"


if __name__ == "__main__":
    argparse.ArgumentParser.parse_args = parse_and_stop  # type: ignore[assignment]
    answers = [complaint(**asked) for asked in json.load(sys.stdin)]
    print("\n" + json.dumps(answers))
