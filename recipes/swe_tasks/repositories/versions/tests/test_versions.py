import unittest

from versions import is_compatible, newest


class TestVersions(unittest.TestCase):
    def test_release_after_candidate(self):
        self.assertEqual(newest(["2.0.0-rc.1", "2.0.0", "1.9.9"]), "2.0.0")
        self.assertEqual(newest(["1.0.0", "2.0.0-alpha"], allow_prerelease=False), "1.0.0")

    def test_compatible(self):
        self.assertTrue(is_compatible("1.4.0", "1.2.5"))
        self.assertFalse(is_compatible("2.0.0", "1.2.5"))

    def test_no_version(self):
        with self.assertRaises(ValueError):
            newest(["1.0"])
        self.assertIsNone(newest([]))
