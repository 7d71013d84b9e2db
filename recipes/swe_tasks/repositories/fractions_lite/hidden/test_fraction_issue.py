import unittest

from fraction import Fraction


class TestFractionIssue(unittest.TestCase):
    def test_sign_in_the_numerator(self):
        self.assertEqual(str(Fraction(1, -2)), "-1/2")
        self.assertEqual(Fraction(-3, -6), Fraction(1, 2))

    def test_order(self):
        self.assertLess(Fraction(1, -2), Fraction(0, 1))
        self.assertEqual(str(Fraction(1, 2) / Fraction(-1, 3)), "-3/2")
