import unittest

from calculator import evaluate


class TestCalculator(unittest.TestCase):
    def test_precedence(self):
        self.assertEqual(evaluate("2 + 3 * 4"), 14)
        self.assertEqual(evaluate("(2 + 3) * 4"), 20)

    def test_sign(self):
        self.assertEqual(evaluate("-2 * -3"), 6)

    def test_errors(self):
        for text in ("1 +", "(1", "1 $ 2", "1 2"):
            with self.assertRaises(ValueError):
                evaluate(text)
