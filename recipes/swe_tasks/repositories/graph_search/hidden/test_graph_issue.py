import unittest

from graph import Graph, shortest_path


class TestGraphIssue(unittest.TestCase):
    def test_detour_is_shorter(self):
        graph = Graph([("a", "b", 10), ("a", "c", 1), ("c", "b", 1)])
        self.assertEqual(shortest_path(graph, "a", "b"), (2, ["a", "c", "b"]))

    def test_several_improvements(self):
        edges = [(0, n, 100 - n) for n in range(1, 10)] + [(n, n - 1, 1) for n in range(2, 10)]
        length, path = shortest_path(Graph(edges), 0, 1)
        self.assertEqual(length, 99)
        self.assertEqual(path[0], 0)
        graph = Graph([("s", "x", 4), ("s", "y", 1), ("y", "z", 1), ("z", "x", 1), ("x", "t", 1)])
        self.assertEqual(shortest_path(graph, "s", "t"), (4, ["s", "y", "z", "x", "t"]))
