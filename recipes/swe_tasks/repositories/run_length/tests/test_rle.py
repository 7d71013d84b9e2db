import unittest

from rle import decode, encode


class TestRle(unittest.TestCase):
    def test_decode(self):
        self.assertEqual(decode("3a1b12c"), "aaab" + 12 * "c")

    def test_nothing(self):
        self.assertEqual((encode(""), decode("")), ("", ""))

    def test_errors(self):
        with self.assertRaises(ValueError):
            encode("a1")
        with self.assertRaises(ValueError):
            decode("a")
