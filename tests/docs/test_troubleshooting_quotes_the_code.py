"""Every message in docs/troubleshooting.md is one that the code, a script or verl can write."""

import ast
import re
from collections import defaultdict
from collections.abc import Iterator
from functools import cache
from importlib.util import find_spec
from itertools import chain
from pathlib import Path

import pytest
from shell_blocks import ROOT

from tree_rl.verl_plugin.refusals.table import TABLE

PAGE = (ROOT / "docs" / "troubleshooting.md").read_text(encoding="utf-8")
MESSAGES = re.findall(r"(?m)^\* `([^`]+)`:\s", PAGE.split("## No message")[0])
OF_VERL = ("trainer/ppo/v1/trainer_base.py", "workers/engine/base.py")
VARIES = "\0"


@cache
def literals() -> tuple[str, ...]:
    """Texts in the sources, with what a format fills in as one mark."""
    paths = [*(ROOT / "tree_rl").rglob("*.py"), *(ROOT / "kernels" / "tree_kernels").rglob("*.py")]
    found = [text for path in [*paths, *of_verl()] for text in texts(path)]
    found += [path.read_text(encoding="utf-8") for path in (ROOT / "scripts").glob("*.sh")]
    return (*found, *refusals())


def refusals() -> Iterator[str]:
    """Messages of the table of refusals."""
    for row in chain(*TABLE.values()):
        words = defaultdict(lambda: VARIES, key=f"{VARIES}.{row.key}")
        words["option"] = f"the tree engine does not support {words['key']}={VARIES}"
        yield "; ".join(part.format_map(words) for part in (row.sentence, row.remedy) if part)


def of_verl() -> list[Path]:
    """Found without importing verl."""
    return [Path(find_spec("verl").origin).parent / name for name in OF_VERL]


def texts(path: Path) -> Iterator[str]:
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.JoinedStr):
            yield "".join(part.value if isinstance(part, ast.Constant) else VARIES for part in node.values)
        elif isinstance(node, ast.Constant) and isinstance(node.value, str):
            yield node.value


def writes(text: str, message: str) -> bool:
    """Whether a text of the sources has the fixed parts of a message in their order; `…` stands for anything."""
    at = 0
    for part in message.split("…"):
        at = text.find(part, at)
        if at < 0:
            return False
        at += len(part)
    return True


@pytest.mark.parametrize("message", MESSAGES)
def test_the_code_says_so(message: str) -> None:
    assert max(map(len, message.split("…"))) >= 8, "too little to find it by"
    sought = message.replace("tree_attention: expected", "…: expected")
    assert any(writes(text, sought) for text in literals()), message


def test_there_are_messages_for_every_phase_and_one_that_nothing_writes_is_found_out() -> None:
    assert len(MESSAGES) > 40 and len(set(MESSAGES)) == len(MESSAGES)
    assert not any(writes(text, "row …: trains its last token") for text in literals())
