"""The shell commands that the documents tell a reader to type."""

import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import bashlex

ROOT = Path(__file__).parents[2]
DOCUMENTS = sorted(
    path
    for pattern in ("*.md", "docs/**/*.md", "examples/**/*.md", "recipes/**/*.md", "kernels/*.md", "docker/*.md")
    for path in ROOT.glob(pattern)
)
FENCE = re.compile(r"^( *)```(\w*) *\n(.*?)^\1``` *$", re.MULTILINE | re.DOTALL)
PLACEHOLDER = re.compile(r"<(your [a-z ]+)>")
"""What a reader replaces; the shell would read it as files."""
FIRST_WORDS = re.compile(r"^(\w+=\S+ )*(bash|cd|curl|docker|export|npm|pip|pytest|python3?|source|torchrun|tree-rl) ")


@dataclass(frozen=True, kw_only=True, slots=True)
class Command:
    """One simple command of a block."""

    document: str
    line: int
    """Of its block's first line in the document."""
    text: str
    """As written, with its variables, on one line."""
    variables: tuple[tuple[str, str], ...]
    words: tuple[str, ...]
    """Without quotes. Empty for an assignment alone."""

    def __str__(self) -> str:
        return f"{self.document}:{self.line}: {self.text}"


def shell_blocks(path: Path) -> Iterator[tuple[int, str]]:
    """Line number and text of every fenced block of a document that a reader would paste into a shell."""
    text = path.read_text(encoding="utf-8")
    for found in FENCE.finditer(text):
        language, block = found[2], found[3]
        is_shell = language in ("bash", "sh", "shell", "console")
        if is_shell or (language == "" and FIRST_WORDS.match(block)):
            yield text[: found.start(3)].count("\n") + 1, block


def commands_of(path: Path) -> list[Command]:
    """Every simple command of a document, those inside loops and substitutions included."""
    name = path.relative_to(ROOT).as_posix()
    found = []
    for line, block in shell_blocks(path):
        script = PLACEHOLDER.sub(lambda match: match[1].replace(" ", "_").upper(), block)
        # bashlex does not know a comment behind a command's last word.
        script = re.sub(r"(?m)(^|\s)#( .*)?$", "", script)
        for tree in bashlex.parse(script.strip()):
            found += [_command(node, script.strip(), name, line) for node in _simple_commands(tree)]
    return found


def _simple_commands(node: Any) -> Iterator[Any]:
    if node.kind == "command":
        yield node
    for part in (*getattr(node, "parts", ()), *getattr(node, "list", ()), getattr(node, "command", None)):
        if part is not None:
            yield from _simple_commands(part)


def _command(node: Any, script: str, document: str, line: int) -> Command:
    text = re.sub(r"\s*\\?\n\s*", " ", script[node.pos[0] : node.pos[1]])
    variables = [part.word.partition("=") for part in node.parts if part.kind == "assignment"]
    words = tuple(part.word for part in node.parts if part.kind == "word")
    return Command(
        document=document,
        line=line,
        text=text,
        variables=tuple((name, value) for name, _, value in variables),
        words=words,
    )


def inline_commands(path: Path) -> list[str]:
    """Code spans in a document that are commands with arguments; upper case stands for what a reader fills in."""
    text = FENCE.sub("", path.read_text(encoding="utf-8"))
    spans = (" ".join(span.split()) for span in re.findall(r"(?<!`)`([^`]+)`(?!`)", text))
    return [span for span in spans if FIRST_WORDS.match(span)]


ALL = [command for path in DOCUMENTS for command in commands_of(path)]
