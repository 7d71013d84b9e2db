"""Exact fractions."""

from functools import total_ordering
from math import gcd


@total_ordering
class Fraction:
    def __init__(self, numerator, denominator=1):
        if denominator == 0:
            raise ZeroDivisionError("denominator is zero")
        divisor = gcd(numerator, denominator) * (1 if denominator > 0 else -1)
        self.numerator = numerator // divisor
        self.denominator = denominator // divisor

    def __repr__(self):
        return f"{self.numerator}/{self.denominator}" if self.denominator != 1 else str(self.numerator)

    def __eq__(self, other):
        return (self.numerator, self.denominator) == (other.numerator, other.denominator)

    def __hash__(self):
        return hash((self.numerator, self.denominator))

    def __lt__(self, other):
        return self.numerator * other.denominator < other.numerator * self.denominator

    def __add__(self, other):
        top = self.numerator * other.denominator + other.numerator * self.denominator
        return Fraction(top, self.denominator * other.denominator)

    def __mul__(self, other):
        return Fraction(self.numerator * other.numerator, self.denominator * other.denominator)

    def __truediv__(self, other):
        return Fraction(self.numerator * other.denominator, self.denominator * other.numerator)
