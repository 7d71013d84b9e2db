import unittest

from linediff import apply, diff


class TestDiff(unittest.TestCase):
    def test_change_in_the_middle(self):
        self.assertEqual(diff(["a", "b", "c"], ["a", "x", "c"]), [(" ", "a"), ("-", "b"), ("+", "x"), (" ", "c")])

    def test_deletion_at_the_end(self):
        self.assertEqual(diff(["a", "b"], ["a"]), [(" ", "a"), ("-", "b")])

    def test_equal(self):
        self.assertEqual(apply(diff(["a", "b"], ["a", "b"])), ["a", "b"])
