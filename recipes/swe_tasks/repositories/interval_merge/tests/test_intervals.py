import unittest

from intervals import gaps, merge, total_length


class TestIntervals(unittest.TestCase):
    def test_overlapping_and_touching(self):
        self.assertEqual(merge([(5, 8), (1, 3), (2, 5)]), [(1, 8)])

    def test_empty_intervals_vanish(self):
        self.assertEqual(merge([(4, 4), (9, 7)]), [])

    def test_gaps(self):
        self.assertEqual(gaps([(1, 2), (4, 5), (9, 10)]), [(2, 4), (5, 9)])
        self.assertEqual(total_length([(1, 2), (4, 6)]), 3)
