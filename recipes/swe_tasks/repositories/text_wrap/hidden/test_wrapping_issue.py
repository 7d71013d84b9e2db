import unittest

from wrapping import fill, wrap


class TestWrappingIssue(unittest.TestCase):
    def test_blank_counts(self):
        self.assertEqual(wrap("aaa bbb", 6), ["aaa", "bbb"])
        self.assertEqual(wrap("aaa bbb", 7), ["aaa bbb"])

    def test_no_line_is_longer(self):
        text = "the quick brown fox jumps over the lazy dog and runs away from it"
        for width in range(5, 40):
            self.assertLessEqual(max(map(len, wrap(text, width))), width)
        self.assertTrue(all(len(line) <= 12 for line in fill(text, 12, "  ").splitlines()))
