"""A cache that forgets what was not used for longest."""

from collections import OrderedDict


class LRUCache:
    def __init__(self, size):
        if size < 1:
            raise ValueError("a cache needs room for one entry")
        self.size = size
        self.hits = 0
        self.misses = 0
        self._entries = OrderedDict()

    def __len__(self):
        return len(self._entries)

    def __contains__(self, key):
        return key in self._entries

    def get(self, key, default=None):
        if key not in self._entries:
            self.misses += 1
            return default
        self._entries.move_to_end(key)
        self.hits += 1
        return self._entries[key]

    def put(self, key, value):
        if key in self._entries:
            self._entries.move_to_end(key)
        self._entries[key] = value
        if len(self._entries) > self.size:
            self._entries.popitem(last=False)
