import unittest

from calculator import evaluate


class TestCalculatorIssue(unittest.TestCase):
    def test_subtraction_from_the_left(self):
        self.assertEqual(evaluate("10 - 3 - 2"), 5)
        self.assertEqual(evaluate("1 - 2 + 3 - 4"), -2)

    def test_division_from_the_left(self):
        self.assertEqual(evaluate("100 / 10 / 2"), 5)
        self.assertEqual(evaluate("100 / 10 * 2 - 1 - 1"), 18)
