import unittest

from globs import matches, select


class TestGlobs(unittest.TestCase):
    def test_within_a_directory(self):
        self.assertTrue(matches("src/*.py", "src/main.py"))
        self.assertFalse(matches("src/*.py", "src/main.txt"))
        self.assertTrue(matches("file?.txt", "file1.txt"))

    def test_double_star(self):
        self.assertTrue(matches("**/*.py", "a/b/c.py"))
        self.assertTrue(matches("**/*.py", "c.py"))

    def test_select(self):
        self.assertEqual(select(["a.py", "b.py", "c.md"], ["*.py"], ["b*"]), ["a.py"])
