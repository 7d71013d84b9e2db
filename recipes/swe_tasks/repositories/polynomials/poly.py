"""Polynomials as lists of coefficients, the constant first."""


def trim(coefficients):
    """Drop zeros of the highest powers; zero itself is [0]."""
    result = list(coefficients)
    while len(result) > 1 and result[-1] == 0:
        result.pop()
    return result or [0]


def evaluate(coefficients, x):
    value = 0
    for factor in reversed(coefficients):
        value = value * x + factor
    return value


def multiply(left, right):
    product = [0] * (len(left) + len(right) - 1)
    for i, a in enumerate(left):
        for j, b in enumerate(right):
            product[i + j] += a * b
    return trim(product)


def derive(coefficients):
    return trim([power * factor for power, factor in enumerate(coefficients)][1:])


def newton_root(coefficients, start, steps=50):
    """A root near `start`."""
    slope = derive(coefficients)
    x = start
    for _ in range(steps):
        gradient = evaluate(slope, x)
        if gradient == 0:
            break
        x -= evaluate(coefficients, x) / gradient
    return x
