import unittest

from sortedlist import SortedList


class TestSortedListIssue(unittest.TestCase):
    def test_first_of_equal_values(self):
        self.assertEqual(SortedList([1, 2, 2, 2, 3]).index(2), 1)

    def test_count(self):
        values = SortedList([5, 5, 5, 7])
        self.assertEqual((values.count(5), values.count(7), values.count(6)), (3, 1, 0))
