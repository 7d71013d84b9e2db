"""Runs programs on the code under test and prints what each returned or raised. It does not know the expected values.

Usage: python3 -I -B case_runner.py PROGRAMS_FILE (standard library only)

The file holds JSON, `[[id, body of a function], ...]`. For every program it prints a line `ID {"value": ...}`,
`ID {"raises": [class and base classes]}` or `ID {"refused": ...}`.
"""

import ast
import json
import os
import sys
from collections.abc import Callable
from typing import Any


def function_of(body: str) -> Callable[[], object]:
    """A function of this body, which may return."""
    module = ast.parse("def program():\n    pass")
    module.body[0].body = ast.parse(body).body  # type: ignore[attr-defined]
    names: dict[str, Any] = {"__name__": "program"}
    exec(compile(module, "program", "exec"), names)
    return names["program"]


def plain(value: object) -> object:
    """A copy made of None and exact bool, int, float, str, list and dict; a tuple becomes a list.

    Raises `TypeError` for any other type, such as a subclass. `is` cannot be deceived by the class under test.
    """
    kind = type(value)
    if value is None or kind is bool or kind is int or kind is float or kind is str:
        return value
    if kind is list or kind is tuple:
        return [plain(item) for item in value]  # type: ignore[attr-defined]
    if kind is dict and all(type(name) is str for name in value):  # type: ignore[attr-defined]
        return {name: plain(item) for name, item in value.items()}  # type: ignore[attr-defined]
    raise TypeError("expected None, bool, int, float, str, or lists and dictionaries with text keys of them")


def answer(body: str) -> dict[str, object]:
    """Run one program."""
    try:
        value = function_of(body)()
    except BaseException as error:  # noqa: BLE001 # also SystemExit
        return {"raises": plain([base.__name__ for base in type(error).__mro__])}
    return {"value": plain(value)}


def main() -> None:
    """Run all programs in order. Their output is dropped."""
    with open(sys.argv[1], encoding="utf-8") as file:
        programs = json.load(file)
    answers = os.dup(1)
    silence = os.open(os.devnull, os.O_WRONLY)
    os.dup2(silence, 1)
    os.dup2(silence, 2)
    sys.path.insert(0, os.getcwd())
    for number, body in programs:
        try:
            text = json.dumps(answer(body))
        except BaseException:  # noqa: BLE001
            text = '{"refused": "no plain value"}'
        os.write(answers, f"{number} {text}\n".encode("ascii"))
    # Do not wait for threads of the code under test.
    os._exit(0)


if __name__ == "__main__":
    main()
