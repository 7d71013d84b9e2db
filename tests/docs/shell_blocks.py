"""The shell commands that the documents tell a reader to type."""

import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import tree_sitter_bash
from tree_sitter import Language, Node, Parser

ROOT = Path(__file__).parents[2]
DOCUMENTS = sorted(
    path
    for pattern in ("*.md", "docs/**/*.md", "examples/**/*.md", "recipes/**/*.md", "kernels/*.md", "docker/*.md")
    for path in ROOT.glob(pattern)
)
FENCE = re.compile(r"^( *)```(\w*) *\n(.*?)^\1``` *$", re.MULTILINE | re.DOTALL)
PLACEHOLDER = re.compile(r"<(your [a-z ]+)>")
"""What a reader replaces; the shell would read it as files."""
BLOCKS = ("program", "list", "do_group", "compound_statement", "if_statement", "variable_assignments")
"""Nodes in which an assignment is a command of its own."""
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
        tree = Parser(Language(tree_sitter_bash.language())).parse(script.encode())
        if tree.root_node.has_error:
            raise ValueError(f"{name}:{line}: not a command of bash: {script}")
        found += [_command(node, name, line) for node in _simple_commands(tree.root_node)]
    return found


def _simple_commands(node: Node) -> Iterator[Node]:
    is_command = node.type in ("command", "declaration_command", "test_command")
    if is_command or (node.type == "variable_assignment" and node.parent and node.parent.type in BLOCKS):
        yield node
    for child in node.named_children:
        yield from _simple_commands(child)


def _command(node: Node, document: str, line: int) -> Command:
    parts = [node] if node.type == "variable_assignment" else node.children
    # Behind `export` an assignment is a word.
    is_own = node.type != "declaration_command"
    variables = [part for part in parts if part.type == "variable_assignment" and is_own]
    named = [_unquoted(part).partition("=") for part in variables]
    return Command(
        document=document,
        line=line,
        text=re.sub(r"\s*\\?\n\s*", " ", _text(node)),
        variables=tuple((name, value) for name, _, value in named),
        words=tuple(_unquoted(part) for part in parts if part not in variables and "redirect" not in part.type),
    )


def _unquoted(node: Node) -> str:
    """The word that bash passes on, variables and substitutions as written."""
    if node.type in ("raw_string", "string"):
        return _text(node)[1:-1]
    if node.type in ("concatenation", "command_name", "variable_assignment"):
        return "".join(map(_unquoted, node.children))
    return re.sub(r"\\(.)", r"\1", _text(node)) if node.type == "word" else _text(node)


def _text(node: Node) -> str:
    return node.text.decode()


def inline_commands(path: Path) -> list[str]:
    """Code spans in a document that are commands with arguments; upper case stands for what a reader fills in."""
    text = FENCE.sub("", path.read_text(encoding="utf-8"))
    spans = (" ".join(span.split()) for span in re.findall(r"(?<!`)`([^`]+)`(?!`)", text))
    return [span for span in spans if FIRST_WORDS.match(span)]


ALL = [command for path in DOCUMENTS for command in commands_of(path)]
