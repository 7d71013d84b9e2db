"""Copies of a task's tests that must fail, because one expected value in each is replaced.

They call the code under test, so they run last: no test that counts runs after them.
"""

import ast
import random
import re
from collections.abc import Callable, Sequence

from tree_rl.rollout.environments.canaries.probes import UNIVERSAL, is_plain, unlike

UNSUITABLE = re.compile(r"skip|xfail|expectedFailure|\b(return|yield|super|flaky|await)\b|__|\t")
"""Code that might end a copy before it fails, or has another meaning in another class."""
CLASS_WIDE = {"setUpClass", "tearDownClass", "setup_class", "teardown_class"}
MOST = 3

Draw = Callable[[str], str]


def copied_methods(
    text: str, node: ast.ClassDef, own: set[str], class_name: str, draw: Draw, rng: random.Random
) -> list[str]:
    """Lines of a subclass of a test class that has its set-up, copies of some of its tests, and none of the others.

    Args:
        own: tests of the class that count.
        draw: returns a canary's name that resembles the given name.
    """
    defined = {item.name: item for item in node.body if isinstance(item, (ast.FunctionDef, ast.AsyncFunctionDef))}
    if defined.keys() & CLASS_WIDE or node.decorator_list or "\t" in text:
        return []
    copies = _copies(text, [item for name, item in defined.items() if name in own], draw, rng)
    if not copies:
        return []
    indent = " " * node.body[0].col_offset
    hidden = [f"{indent}{name} = None" for name in defined if name.startswith("test")]
    return ["", "", f"class {class_name}({node.name}):", *hidden, *copies]


def copied_functions(text: str, tree: ast.Module, own: set[str], draw: Draw, rng: random.Random) -> list[str]:
    """Lines with copies of some test functions, for the end of their file."""
    functions = [node for node in tree.body if isinstance(node, ast.FunctionDef) and node.name in own]
    return _copies(text, functions, draw, rng)


def _copies(
    text: str, functions: Sequence[ast.FunctionDef | ast.AsyncFunctionDef], draw: Draw, rng: random.Random
) -> list[str]:
    lines: list[str] = []
    suitable = [(function, _expected(function)) for function in functions if _is_suitable(text, function)]
    found = [(function, expected) for function, expected in suitable if expected is not None]
    for function, expected in rng.sample(found, min(MOST, len(found))):
        lines += ["", *_changed(text, function, expected, draw(function.name), rng)]
    return lines


def _is_suitable(text: str, function: ast.FunctionDef | ast.AsyncFunctionDef) -> bool:
    source = ast.get_source_segment(text, function) or ""
    marks = [ast.get_source_segment(text, mark) or "" for mark in function.decorator_list]
    only_parametrized = all(mark.startswith("pytest.mark.parametrize(") and "marks" not in mark for mark in marks)
    is_special = any(UNSUITABLE.search(part) or UNIVERSAL.search(part) for part in (source, *marks))
    return isinstance(function, ast.FunctionDef) and only_parametrized and not is_special


def _expected(function: ast.FunctionDef | ast.AsyncFunctionDef) -> ast.expr | None:
    """The expected value of a test's last top-level equality: the side that is a literal, else the right side."""
    for statement in reversed(function.body):
        sides: list[ast.expr] = []
        if isinstance(statement, ast.Assert) and isinstance(statement.test, ast.Compare):
            if len(statement.test.ops) == 1 and isinstance(statement.test.ops[0], ast.Eq):
                sides = [statement.test.left, statement.test.comparators[0]]
        elif isinstance(statement, ast.Expr) and isinstance(statement.value, ast.Call):
            called = statement.value.func
            if isinstance(called, ast.Attribute) and ast.unparse(called) == "self.assertEqual":
                sides = statement.value.args[:2]
        if len(sides) == 2 and not any(isinstance(side, (ast.Starred, ast.NamedExpr)) for side in sides):
            return sides[0] if is_plain(sides[0]) and not is_plain(sides[1]) else sides[1]
    return None


def _changed(text: str, function: ast.AST, expected: ast.expr, name: str, rng: random.Random) -> list[str]:
    """Lines of a test with another name and another expected value."""
    assert isinstance(function, ast.FunctionDef)
    lines = [line.encode() for line in text.split("\n")]
    first, last = expected.lineno - 1, (expected.end_lineno or 0) - 1
    tail = lines[last][expected.end_col_offset or 0 :]
    lines[first : last + 1] = [lines[first][: expected.col_offset] + repr(unlike(expected, rng)).encode() + tail]
    start = min([function.lineno, *(mark.lineno for mark in function.decorator_list)]) - 1
    copied = [line.decode() for line in lines[start : (function.end_lineno or 0) - (last - first)]]
    head = function.lineno - 1 - start
    copied[head] = re.sub(rf"\bdef\s+{re.escape(function.name)}\b", f"def {name}", copied[head], count=1)
    return copied
