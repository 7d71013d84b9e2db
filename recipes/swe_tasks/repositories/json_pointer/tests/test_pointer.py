import unittest

from pointer import get, put


class TestPointer(unittest.TestCase):
    def setUp(self):
        self.document = {"a": [{"b": 1}, 2], "": 3}

    def test_get(self):
        self.assertEqual(get(self.document, "/a/0/b"), 1)
        self.assertEqual(get(self.document, "/"), 3)
        self.assertIs(get(self.document, ""), self.document)

    def test_missing(self):
        for pointer in ("/x", "/a/7", "/a/b", "/a/1/z"):
            with self.assertRaises(LookupError):
                get(self.document, pointer)

    def test_put(self):
        put(self.document, "/a/1", 9)
        put(self.document, "/new", 0)
        self.assertEqual(self.document, {"a": [{"b": 1}, 9], "": 3, "new": 0})
