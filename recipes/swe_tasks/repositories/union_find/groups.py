"""Disjoint groups that are joined (union-find)."""


class Groups:
    def __init__(self, elements):
        self._parent = {element: element for element in elements}
        self._size = dict.fromkeys(self._parent, 1)
        self.count = len(self._parent)

    def find(self, element):
        """The group's representative."""
        while self._parent[element] != element:
            self._parent[element] = self._parent[self._parent[element]]
            element = self._parent[element]
        return element

    def join(self, left, right):
        """Unite two groups; False if they were one already."""
        a, b = self.find(left), self.find(right)
        if a == b:
            return False
        if self._size[a] < self._size[b]:
            a, b = b, a
        self._parent[b] = a
        self._size[a] += self._size[b]
        self.count -= 1
        return True

    def size(self, element):
        return self._size[self.find(element)]

    def together(self, left, right):
        return self.find(left) == self.find(right)
