import unittest

from url import parse


class TestUrlIssue(unittest.TestCase):
    def test_port_without_path(self):
        address = parse("http://example.org:8080")
        self.assertEqual((address.host, address.port, address.path), ("example.org", 8080, "/"))

    def test_port_with_query_only(self):
        address = parse("https://h:1?x=2")
        self.assertEqual((address.host, address.port, address.query), ("h", 1, {"x": ["2"]}))
