import unittest

from globs import matches, select


class TestGlobsIssue(unittest.TestCase):
    def test_star_stops_at_a_slash(self):
        self.assertFalse(matches("src/*.py", "src/deep/file.py"))
        self.assertFalse(matches("*", "a/b"))

    def test_select_by_level(self):
        self.assertEqual(select(["x.py", "lib/y.py", "lib/z/w.py"], ["*/*.py"]), ["lib/y.py"])
