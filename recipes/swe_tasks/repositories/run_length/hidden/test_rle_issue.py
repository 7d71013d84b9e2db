import unittest

from rle import decode, encode


class TestRleIssue(unittest.TestCase):
    def test_last_run(self):
        self.assertEqual(encode("aaab"), "3a1b")
        self.assertEqual(encode("x"), "1x")

    def test_round_trip(self):
        for text in ("a", "aa", "abab", "  hello  world  ", "zzzzzzzzzzzzy"):
            self.assertEqual(decode(encode(text)), text)
