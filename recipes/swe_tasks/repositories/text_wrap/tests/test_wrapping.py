import unittest

from wrapping import fill, wrap


class TestWrapping(unittest.TestCase):
    def test_long_words_stand_alone(self):
        self.assertEqual(wrap("a extraordinarily b", 4), ["a", "extraordinarily", "b"])

    def test_white_space_is_collapsed(self):
        self.assertEqual(wrap("  a \n\n b ", 20), ["a b"])
        self.assertEqual(wrap("", 5), [])

    def test_indent(self):
        self.assertEqual(fill("one two", 30, "> "), "> one two")
