"""The list of docs/commands.md: what a test does with every command of the documents, and how long it takes."""

import re
from typing import NamedTuple

from shell_blocks import ALL, ROOT, Command

PAGE = ROOT / "docs" / "commands.md"
RUNS, SLOW, PARSED, RECIPE, SHELL = TREATMENTS = ("runs", "runs, slow", "parsed", "recipe", "shell")
ROW = re.compile(rf"^\* `([^`]+)`:\s+(?:({'|'.join(TREATMENTS)})|\[file\]\(\.\./([^)]+)\)); (.+)$", re.MULTILINE)


class Row(NamedTuple):
    """A line of the page's list: how a command starts, without quotes; a treatment or a test file; the time."""

    start: str
    treatment: str
    time: str


ROWS = [
    Row(start=start, treatment=treatment or file, time=time.strip())
    for start, treatment, file, time in ROW.findall(PAGE.read_text(encoding="utf-8"))
]


def row_of(command: Command) -> Row | None:
    """The longest line with which the command starts; None if none does."""
    words = " ".join(command.words)
    return max((row for row in ROWS if words.startswith(row.start)), key=lambda row: len(row.start), default=None)


def treated(*treatments: str) -> list[Command]:
    """Different commands of the documents that a test treats so, in the documents' order; all without an argument."""
    rows = ((command, row_of(command)) for command in ALL if command.words)
    found = {
        command.text: command
        for command, row in rows
        if row is not None and (not treatments or row.treatment in treatments)
    }
    return list(found.values())
