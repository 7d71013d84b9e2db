import unittest

from trie import Trie


class TestTrie(unittest.TestCase):
    def setUp(self):
        self.trie = Trie(["care", "card", "dog"])

    def test_completions_are_sorted(self):
        self.assertEqual(self.trie.complete("ca"), ["card", "care"])
        self.assertEqual(self.trie.complete("x"), [])

    def test_membership(self):
        self.assertIn("dog", self.trie)
        self.assertNotIn("do", self.trie)
