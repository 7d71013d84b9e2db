import unittest

from ini import read, write


class TestIni(unittest.TestCase):
    def test_one_section(self):
        self.assertEqual(read("# note\n[a]\nx = 1\ny=two = 3\n"), {"a": {"x": "1", "y": "two = 3"}})

    def test_no_section(self):
        self.assertEqual(read("x = 1"), {"": {"x": "1"}})

    def test_error_names_the_line(self):
        with self.assertRaisesRegex(ValueError, "line 2"):
            read("[a]\nnonsense")

    def test_write(self):
        self.assertEqual(write({"b": {"y": "2"}, "": {"x": "1"}}), "x = 1\n[b]\ny = 2")
