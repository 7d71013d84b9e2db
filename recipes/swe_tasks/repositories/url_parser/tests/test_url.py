import unittest

from url import parse, parse_query


class TestUrl(unittest.TestCase):
    def test_whole_address(self):
        address = parse("https://Example.org:8443/a/b?x=1&y=two+words&x=3#top")
        self.assertEqual(address, ("https", "example.org", 8443, "/a/b", {"x": ["1", "3"], "y": ["two words"]}))

    def test_standard_port(self):
        self.assertEqual(parse("http://example.org").port, 80)

    def test_no_address(self):
        with self.assertRaises(ValueError):
            parse("example.org")

    def test_empty_query(self):
        self.assertEqual(parse_query(""), {})
