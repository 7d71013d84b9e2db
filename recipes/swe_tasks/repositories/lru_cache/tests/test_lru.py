import unittest

from lru import LRUCache


class TestLRU(unittest.TestCase):
    def test_oldest_entry_goes(self):
        cache = LRUCache(2)
        for key in "abc":
            cache.put(key, key.upper())
        self.assertNotIn("a", cache)
        self.assertEqual(cache.get("c"), "C")

    def test_counts(self):
        cache = LRUCache(1)
        cache.put("a", 1)
        cache.get("a")
        cache.get("b")
        self.assertEqual((cache.hits, cache.misses), (1, 1))

    def test_size_is_checked(self):
        with self.assertRaises(ValueError):
            LRUCache(0)
