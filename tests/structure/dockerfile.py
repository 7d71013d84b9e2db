"""A Dockerfile as its instructions."""

import re
from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True, kw_only=True, slots=True)
class Instruction:
    word: str
    """In capitals, such as RUN."""
    text: str
    """What follows, continued lines joined, comments left out."""


def read_dockerfile(path: Path) -> list[Instruction]:
    lines = [line for line in path.read_text(encoding="utf-8").splitlines() if not line.lstrip().startswith("#")]
    joined = re.sub(r"\\\n\s*", " ", "\n".join(lines))
    parts = [line.split(maxsplit=1) for line in joined.splitlines() if line.strip()]
    return [Instruction(word=word.upper(), text=text.strip()) for word, text in parts]
