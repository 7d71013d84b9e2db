import unittest

from pointer import get, put


class TestPointerIssue(unittest.TestCase):
    def test_slash_and_tilde(self):
        self.assertEqual(get({"a/b": 1}, "/a~1b"), 1)
        self.assertEqual(get({"m~n": 2}, "/m~0n"), 2)

    def test_order_of_unescaping(self):
        self.assertEqual(get({"m~1": 3, "m/": 4}, "/m~01"), 3)
        document = {}
        put(document, "/x~1y", 5)
        self.assertEqual(document, {"x/y": 5})
