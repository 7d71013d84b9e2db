import unittest

from poly import derive, newton_root


class TestPolyIssue(unittest.TestCase):
    def test_derivative(self):
        self.assertEqual(derive([5, 3, 2]), [3, 4])
        self.assertEqual(derive([0, 0, 0, 2]), [0, 0, 6])

    def test_root(self):
        self.assertEqual(derive([7]), [0])
        self.assertAlmostEqual(newton_root([-2, 0, 1], 1.0), 2**0.5)
