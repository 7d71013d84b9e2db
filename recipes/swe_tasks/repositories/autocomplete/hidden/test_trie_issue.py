import unittest

from trie import Trie


class TestTrieIssue(unittest.TestCase):
    def test_a_word_completes_itself(self):
        self.assertEqual(Trie(["card", "car", "care"]).complete("car"), ["car", "card", "care"])

    def test_whole_word_only(self):
        self.assertEqual(Trie(["dog"]).complete("dog"), ["dog"])
        self.assertEqual(Trie(["a", ""]).complete(""), ["", "a"])
