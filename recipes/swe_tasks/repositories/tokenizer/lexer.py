"""Splits a small programming language into tokens."""

import re
from typing import NamedTuple


class Token(NamedTuple):
    kind: str
    text: str
    column: int


RULES = (
    ("NUMBER", r"\d+(?:\.\d+)?"),
    ("NAME", r"[A-Za-z_]\w*"),
    ("STRING", r'"[^"]*"'),
    ("COMPARE", r"==|!=|<=|>=|<|>"),
    ("ASSIGN", r"="),
    ("OPERATOR", r"[-+*/%]"),
    ("DOT", r"\."),
    ("PAREN", r"[()]"),
    ("SPACE", r"\s+"),
    ("OTHER", r"."),
)
PATTERN = re.compile("|".join(f"(?P<{kind}>{pattern})" for kind, pattern in RULES))


def tokenize(text):
    tokens = []
    for match in PATTERN.finditer(text):
        if match.lastgroup == "SPACE":
            continue
        if match.lastgroup == "OTHER":
            raise SyntaxError(f"column {match.start()}: unexpected {match.group()!r}")
        tokens.append(Token(match.lastgroup, match.group(), match.start()))
    return tokens
