"""Words by their prefixes."""


class Node:
    def __init__(self):
        self.children = {}
        self.is_word = False


class Trie:
    def __init__(self, words=()):
        self.root = Node()
        for word in words:
            self.add(word)

    def add(self, word):
        node = self.root
        for letter in word:
            node = node.children.setdefault(letter, Node())
        node.is_word = True

    def __contains__(self, word):
        node = self._find(word)
        return node is not None and node.is_word

    def complete(self, prefix):
        """Stored words that start with the prefix, in alphabetical order."""
        node = self._find(prefix)
        return [] if node is None else list(self._words(node, prefix))

    def _find(self, prefix):
        node = self.root
        for letter in prefix:
            node = node.children.get(letter)
            if node is None:
                return None
        return node

    def _words(self, node, prefix):
        if node.is_word:
            yield prefix
        for letter in sorted(node.children):
            yield from self._words(node.children[letter], prefix + letter)
