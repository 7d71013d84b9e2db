import unittest

from poly import evaluate, multiply, trim


class TestPoly(unittest.TestCase):
    def test_evaluate(self):
        self.assertEqual(evaluate([5, 3, 2], 2), 19)

    def test_multiply(self):
        self.assertEqual(multiply([1, 1], [-1, 1]), [-1, 0, 1])
        self.assertEqual(multiply([1, 2], [0]), [0])

    def test_trim(self):
        self.assertEqual(trim([1, 0, 0]), [1])
        self.assertEqual(trim([]), [0])
