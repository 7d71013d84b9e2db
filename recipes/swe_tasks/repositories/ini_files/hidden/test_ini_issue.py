import unittest

from ini import read, write


class TestIniIssue(unittest.TestCase):
    def test_sections_are_apart(self):
        self.assertEqual(read("[a]\nx = 1\n[b]\ny = 2"), {"a": {"x": "1"}, "b": {"y": "2"}})

    def test_a_section_may_go_on_later(self):
        text = "z = 0\n[a]\nx = 1\n[b]\ny = 2\n[a]\nw = 3"
        self.assertEqual(read(text), {"": {"z": "0"}, "a": {"x": "1", "w": "3"}, "b": {"y": "2"}})
        self.assertEqual(read(write(read(text))), read(text))
