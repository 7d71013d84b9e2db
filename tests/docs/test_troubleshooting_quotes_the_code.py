"""Every message in docs/troubleshooting.md is one that the code, a script or verl can write."""

import ast
import re
from collections.abc import Iterator
from functools import cache
from importlib.util import find_spec
from pathlib import Path

import pytest
from shell_blocks import ROOT

PAGE = (ROOT / "docs" / "troubleshooting.md").read_text(encoding="utf-8")
MESSAGES = re.findall(r"(?m)^\| `([^`]+)` \| [^|]+ \| [^|]+ \|$", PAGE.split("## No message")[0])
OF_VERL = ("verl.trainer.ppo.v1.trainer_base", "verl.workers.engine.base")
VARIES = "\0"


@cache
def literals() -> tuple[str, ...]:
    """Texts in the sources, with what a format fills in as one mark."""
    paths = [*(ROOT / "tree_rl").rglob("*.py"), *(ROOT / "kernels" / "tree_kernels").rglob("*.py")]
    found = [text for path in [*paths, *map(file_of, OF_VERL)] for text in texts(path)]
    found += [path.read_text(encoding="utf-8") for path in (ROOT / "scripts").glob("*.sh")]
    return tuple(found)


def file_of(module: str) -> Path:
    spec = find_spec(module)
    assert spec is not None and spec.origin is not None
    return Path(spec.origin)


def texts(path: Path) -> Iterator[str]:
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.JoinedStr):
            yield "".join(part.value if isinstance(part, ast.Constant) else VARIES for part in node.values)
        elif isinstance(node, ast.Constant) and isinstance(node.value, str):
            yield node.value


def pattern(message: str) -> re.Pattern[str]:
    """The fixed parts of a message in their order; `…` stands for anything, and the rest for itself."""
    return re.compile(".*?".join(map(re.escape, message.split("…"))), re.DOTALL)


def test_there_are_messages_for_every_phase() -> None:
    assert len(MESSAGES) > 40 and len(set(MESSAGES)) == len(MESSAGES)


@pytest.mark.parametrize("message", MESSAGES)
def test_the_code_says_so(message: str) -> None:
    fixed = message.split("…")
    assert max(map(len, fixed)) >= 8, "too little to find it by"
    sought = pattern(message.replace("tree_attention: expected", "…: expected"))
    assert any(sought.search(text) for text in literals()), message


def test_a_message_that_nothing_writes_is_found_out() -> None:
    assert not any(pattern("row …: trains its last token").search(text) for text in literals())
