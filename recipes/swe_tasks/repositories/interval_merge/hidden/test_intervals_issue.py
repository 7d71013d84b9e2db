import unittest

from intervals import gaps, merge, total_length


class TestIntervalsIssue(unittest.TestCase):
    def test_contained_interval(self):
        self.assertEqual(merge([(1, 10), (2, 3)]), [(1, 10)])

    def test_contained_then_new(self):
        self.assertEqual(merge([(0, 9), (1, 2), (3, 4), (8, 12)]), [(0, 12)])
        self.assertEqual(total_length([(0, 9), (1, 2)]), 9)
        self.assertEqual(gaps([(0, 9), (1, 2), (20, 21)]), [(9, 20)])
