import unittest

from versions import is_compatible, newest


class TestVersionsIssue(unittest.TestCase):
    def test_numbers_not_texts(self):
        self.assertEqual(newest(["1.9.0", "1.10.0"]), "1.10.0")
        self.assertTrue(is_compatible("1.10.0", "1.9.3"))

    def test_numbers_in_candidates(self):
        self.assertEqual(newest(["2.0.0-rc.2", "2.0.0-rc.10"]), "2.0.0-rc.10")
