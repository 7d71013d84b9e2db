"""Copies of a task's own tests that must fail: in each, one value that a test expects is replaced by another.

They call the code under test, so they stand where they run last: no test that counts runs after them.
"""

import ast
import random
import re
from collections.abc import Callable, Sequence

from tree_rl.rollout.environments.canaries.probes import UNIVERSAL, is_plain, unlike

UNSUITABLE = re.compile(r"skip|xfail|expectedFailure|\b(return|yield|super|flaky|await)\b|__|\t")
"""What might end a copy before it fails, or does not mean the same in another class."""
CLASS_WIDE = {"setUpClass", "tearDownClass", "setup_class", "teardown_class"}
MOST = 3

Draw = Callable[[str], str]


def copied_methods(
    text: str, node: ast.ClassDef, own: set[str], class_name: str, draw: Draw, rng: random.Random
) -> list[str]:
    """Lines of a class beside a class of tests: its preparations, none of its tests, and copies of some.

    Args:
        own: tests of the class that count.
        draw: makes the name of a canary that looks like the given one.
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
    """Lines with copies of some functions of tests, at the end of their file."""
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
    """What the last equality at the top level of a test expects: the plain side, or the right one."""
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
    """Lines of a test under another name, with another value in place of the expected one."""
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
