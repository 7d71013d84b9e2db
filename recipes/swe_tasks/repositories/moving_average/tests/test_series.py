import unittest

from series import largest_jump, moving_average


class TestSeries(unittest.TestCase):
    def test_single_window(self):
        self.assertEqual(moving_average([2, 4, 6], 3), [4.0])
        self.assertEqual(moving_average([1], 2), [])

    def test_window_is_checked(self):
        with self.assertRaises(ValueError):
            moving_average([1], 0)

    def test_jump(self):
        self.assertEqual(largest_jump([1, 2, 9, 8]), (7, 1))
        self.assertIsNone(largest_jump([1]))
