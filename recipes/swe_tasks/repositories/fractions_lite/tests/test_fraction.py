import unittest

from fraction import Fraction


class TestFraction(unittest.TestCase):
    def test_reduced(self):
        self.assertEqual(str(Fraction(6, 4)), "3/2")
        self.assertEqual(str(Fraction(4, 2)), "2")

    def test_arithmetic(self):
        self.assertEqual(Fraction(1, 2) + Fraction(1, 3), Fraction(5, 6))
        self.assertEqual(Fraction(1, 2) * Fraction(2, 3), Fraction(1, 3))

    def test_zero_denominator(self):
        with self.assertRaises(ZeroDivisionError):
            Fraction(1, 0)
