import unittest

from matrix import Matrix


class TestMatrixIssue(unittest.TestCase):
    def test_wide_result(self):
        product = Matrix([[1, 0, 2], [0, 1, 1]]) @ Matrix([[1, 2, 3, 4], [5, 6, 7, 8], [1, 1, 1, 1]])
        self.assertEqual(product, Matrix([[3, 4, 5, 6], [6, 7, 8, 9]]))

    def test_narrow_result(self):
        self.assertEqual(Matrix([[1, 2, 3]]) @ Matrix([[1], [1], [1]]), Matrix([[6]]))
