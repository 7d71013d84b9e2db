import unittest

from toposort import order


class TestToposort(unittest.TestCase):
    def test_chain(self):
        self.assertEqual(order({"c": ["b"], "b": ["a"]}), ["a", "b", "c"])

    def test_ties_are_alphabetical(self):
        self.assertEqual(order({"z": [], "m": ["z"], "a": []}), ["a", "z", "m"])

    def test_nothing(self):
        self.assertEqual(order({}), [])
