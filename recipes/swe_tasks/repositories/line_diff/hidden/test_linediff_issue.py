import unittest

from linediff import apply, diff


class TestDiffIssue(unittest.TestCase):
    def test_insertion_at_the_end(self):
        self.assertEqual(diff(["a"], ["a", "b"]), [(" ", "a"), ("+", "b")])

    def test_applying_gives_the_new_lines(self):
        for old, new in (([], ["x"]), (["a"], ["b", "c"]), (list("abcd"), list("bxdyz"))):
            self.assertEqual(apply(diff(old, new)), new)
