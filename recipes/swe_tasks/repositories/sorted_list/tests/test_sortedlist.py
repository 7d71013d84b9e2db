import unittest

from sortedlist import SortedList


class TestSortedList(unittest.TestCase):
    def test_adding_keeps_the_order(self):
        values = SortedList([3, 1])
        values.add(2)
        values.add(5)
        self.assertEqual(list(values), [1, 2, 3, 5])

    def test_index_of_single_values(self):
        values = SortedList([10, 20, 30])
        self.assertEqual([values.index(v) for v in (10, 20, 30)], [0, 1, 2])

    def test_missing(self):
        with self.assertRaises(ValueError):
            SortedList([1, 3]).index(2)
        self.assertEqual(SortedList([1]).count(9), 0)
