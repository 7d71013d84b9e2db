import unittest

from series import is_rising, moving_average


class TestSeriesIssue(unittest.TestCase):
    def test_all_windows(self):
        self.assertEqual(moving_average([1, 2, 3, 4], 2), [1.5, 2.5, 3.5])
        self.assertEqual(moving_average([5, 1, 3], 1), [5.0, 1.0, 3.0])

    def test_rising(self):
        self.assertTrue(is_rising([1, 3, 2, 5, 4, 8], 2))
        self.assertFalse(is_rising([1, 5, 4, 3], 2))
