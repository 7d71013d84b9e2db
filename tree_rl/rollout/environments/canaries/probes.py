"""Checks whether the values that a test compares also equal a random value, which no honest object does.

An object that equals it fails its test. Line numbers stay, and every expression of the test is still evaluated once.
"""

import ast
import random
import re
from collections.abc import Iterator

EQUALITIES = {
    *("assertEqual", "assertEquals", "assertListEqual", "assertTupleEqual", "assertSetEqual", "assertDictEqual"),
    *("assertSequenceEqual", "assertCountEqual", "assertMultiLineEqual", "assertAlmostEqual"),
}
ORDERINGS = {"assertLess", "assertLessEqual", "assertGreater", "assertGreaterEqual"}
TRUTHS = {"assertTrue", "assertFalse"}
ORDERED = (ast.Lt, ast.LtE, ast.Gt, ast.GtE)
LETTERS = "abcdefghijklmnopqrstuvwxyz"
UNIVERSAL = re.compile(r"\b(ANY|ALWAYS_EQ|anything)\b")
"""Names of objects that equal everything; we leave tests that use them unchanged."""
MATCHERS = re.compile(r"\b\w*(Any|Match|Like|Regex|Wildcard|Ignore|InstanceOf|Is[A-Z]|Has[A-Z]|Contain)\w*\b")
"""Names of objects that may equal values of another form."""
PROBE = """

def {name}(value, other, times, ordered=False):
    import sys
    import warnings

    mocks = getattr(sys.modules.get("unittest.mock"), "NonCallableMock", ())
    waiting, number = [(value, 0)], 0
    while waiting and number < 300:
        item, depth = waiting.pop()
        number += 1
        kind = type(item)
        if item is None or kind in (bool, int, float, complex, str, bytes):
            continue
        try:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")
                is_false = any([bool(item == other) for _ in range(times)])
                is_false = is_false or (ordered and depth == 0 and bool(item < times) and bool(item > times))
        except Exception:
            is_false = False
        if is_false:
            raise AssertionError("%r is not %r" % (kind, other))
        try:
            if depth < 3 and kind in (list, tuple, set, frozenset):
                waiting.extend([(inner, depth + 1) for inner in item])
            elif depth < 3 and kind is dict:
                waiting.extend([(inner, depth + 1) for inner in item.values()])
            elif depth < 2 and kind.__flags__ & 512 and not issubclass(kind, type):
                inside = object.__getattribute__(item, "__dict__").values()
                waiting.extend([(inner, depth + 1) for inner in inside if not (mocks and isinstance(inner, mocks))])
        except Exception:
            continue
    return value
"""
"""Source of the probe. It skips plain values, which cannot lie, and examines attributes of objects of Python classes
(flag 512), except mocks, which would record the comparison."""


Insertion = tuple[int, int, str]
"""Line of a file, counted from 1, column of the line, in bytes, and the text to insert there."""


def probed(text: str, tree: ast.Module, name: str, rng: random.Random) -> str:
    """Insert the probe around every value that a test function compares.

    Args:
        text: a test file; `tree` is its syntax tree.
        name: name of the probe, which the file must not contain.

    Returns:
        The file with the same lines and the probe at its end; unchanged if it compares nothing.
    """
    functions = list(_test_functions(tree))
    outside = [node for node in tree.body if not isinstance(node, (ast.FunctionDef, ast.ClassDef, ast.ImportFrom))]
    if any(UNIVERSAL.search(ast.get_source_segment(text, node) or "") for node in outside):
        return text
    own = [node.name for node in ast.walk(tree) if isinstance(node, ast.ClassDef) and _defines(node, "__eq__")]
    insertions = [
        insertion
        for function in functions
        if not _mentions(text, function, own)
        for insertion in _insertions(text, function, name, rng)
    ]
    if not insertions:
        return text
    lines = [line.encode() for line in text.split("\n")]
    for number, column, inserted in sorted(insertions, reverse=True):
        line = lines[number - 1]
        lines[number - 1] = line[:column] + inserted.encode() + line[column:]
    return b"\n".join(lines).decode() + PROBE.format(name=name)


def _test_functions(tree: ast.Module) -> Iterator[ast.FunctionDef | ast.AsyncFunctionDef]:
    """All test functions. They run after their file was executed, so the probe can be at its end."""
    for node in tree.body:
        for inner in node.body if isinstance(node, ast.ClassDef) else [node]:
            if isinstance(inner, (ast.FunctionDef, ast.AsyncFunctionDef)) and inner.name.startswith("test"):
                yield inner


def _defines(node: ast.ClassDef, method: str) -> bool:
    return any(isinstance(item, ast.FunctionDef) and item.name == method for item in node.body)


def _mentions(text: str, function: ast.AST, own: list[str]) -> bool:
    source = ast.get_source_segment(text, function) or ""
    return bool(UNIVERSAL.search(source)) or any(re.search(rf"\b{re.escape(name)}\b", source) for name in own)


def _insertions(text: str, function: ast.AST, name: str, rng: random.Random) -> Iterator[Insertion]:
    for node in ast.walk(function):
        for operand, expected, is_ordered in _compared(node):
            source = ast.get_source_segment(text, operand) or ""
            if (
                is_plain(operand)
                or isinstance(operand, (ast.Starred, ast.Lambda, ast.Yield))
                or MATCHERS.search(source)
            ):
                continue
            other = repr(unlike(expected, rng))
            end_line, end_column = operand.end_lineno or 0, operand.end_col_offset or 0
            yield operand.lineno, operand.col_offset, f"{name}("
            yield end_line, end_column, f", {other}, {rng.randint(1, 3)}{', True' if is_ordered else ''})"


def _compared(node: ast.AST) -> Iterator[tuple[ast.expr, ast.expr | None, bool]]:
    """Operands of a comparison: each with the expression that it must equal (or None), and True for an ordering."""
    if isinstance(node, ast.Assert):
        yield from _in_condition(node.test)
    if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and node.args:
        if node.func.attr in EQUALITIES | ORDERINGS and len(node.args) > 1:
            is_ordered, (left, right) = node.func.attr in ORDERINGS, node.args[:2]
            yield left, None if is_ordered else right, is_ordered
            yield right, None if is_ordered else left, is_ordered
        elif node.func.attr in {"assertIn", "assertNotIn", "assertNotEqual"}:
            yield node.args[0], None, False
        elif node.func.attr in TRUTHS:
            yield from _in_condition(node.args[0])


def _in_condition(test: ast.expr) -> Iterator[tuple[ast.expr, ast.expr | None, bool]]:
    if isinstance(test, ast.BoolOp):
        for value in test.values:
            yield from _in_condition(value)
    elif isinstance(test, ast.UnaryOp):
        yield from _in_condition(test.operand)
    elif isinstance(test, ast.Compare) and len(test.ops) == 1 and not isinstance(test.ops[0], (ast.Is, ast.IsNot)):
        right = test.comparators[0]
        is_ordered, is_equality = isinstance(test.ops[0], ORDERED), isinstance(test.ops[0], ast.Eq)
        yield test.left, right if is_equality else None, is_ordered
        if not isinstance(test.ops[0], (ast.In, ast.NotIn)):
            yield right, test.left if is_equality else None, is_ordered


def is_plain(node: ast.expr) -> bool:
    """True if an expression is a number or a text."""
    return isinstance(node, (ast.Constant, ast.JoinedStr))


def unlike(expected: ast.expr | None, rng: random.Random) -> object:
    """A plain value that differs from the expected one, but resembles it if that is a literal."""
    noise = "".join(rng.choices(LETTERS, k=rng.randint(5, 9)))
    try:
        value = None if expected is None else ast.literal_eval(expected)
    except (ValueError, TypeError, RecursionError, MemoryError, SyntaxError):
        value = None
    number = rng.randint(10_000, 10_000_000)
    if isinstance(value, bool) or value is None:
        return rng.choice([noise, number])
    if isinstance(value, str) and 0 < len(value) < 200:
        return value[: len(value) // 2] + noise
    if isinstance(value, (int, float)):
        return number + 0.5 if isinstance(value, float) else number + abs(value)
    if isinstance(value, list) and len(value) < 20:
        return [*value, noise]
    return noise
