import unittest

from matrix import Matrix


class TestMatrix(unittest.TestCase):
    def test_square_product(self):
        self.assertEqual(Matrix([[1, 2], [3, 4]]) @ Matrix([[0, 1], [1, 0]]), Matrix([[2, 1], [4, 3]]))

    def test_sum_and_transpose(self):
        self.assertEqual(Matrix([[1, 2]]) + Matrix([[3, 4]]), Matrix([[4, 6]]))
        self.assertEqual(Matrix([[1, 2, 3]]).transpose(), Matrix([[1], [2], [3]]))

    def test_shapes_are_checked(self):
        with self.assertRaises(ValueError):
            Matrix([[1, 2]]) @ Matrix([[1, 2]])
        with self.assertRaises(ValueError):
            Matrix([[1], [1, 2]])
