import unittest

from lru import LRUCache


class TestLRUIssue(unittest.TestCase):
    def test_reading_keeps_an_entry(self):
        cache = LRUCache(2)
        cache.put("a", 1)
        cache.put("b", 2)
        cache.get("a")
        cache.put("c", 3)
        self.assertIn("a", cache)
        self.assertNotIn("b", cache)

    def test_a_hot_entry_survives_a_scan(self):
        cache = LRUCache(3)
        cache.put("hot", 0)
        for number in range(20):
            cache.put(number, number)
            self.assertEqual(cache.get("hot"), 0)
