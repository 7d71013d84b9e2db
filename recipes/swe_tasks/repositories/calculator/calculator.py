from parser import Parser
from scanner import scan

OPERATIONS = {
    "+": lambda a, b: a + b,
    "-": lambda a, b: a - b,
    "*": lambda a, b: a * b,
    "/": lambda a, b: a / b,
}


def compute(tree):
    if isinstance(tree, float):
        return tree
    operator, left, right = tree
    return OPERATIONS[operator](compute(left), compute(right))


def evaluate(text):
    return compute(Parser(scan(text)).parse())
