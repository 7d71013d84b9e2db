import unittest

from graph import Graph, shortest_path


class TestGraph(unittest.TestCase):
    def test_line(self):
        graph = Graph([("a", "b", 2), ("b", "c", 3)])
        self.assertEqual(shortest_path(graph, "a", "c"), (5, ["a", "b", "c"]))

    def test_unreachable(self):
        graph = Graph([("a", "b", 1)])
        self.assertIsNone(shortest_path(graph, "b", "a"))
        self.assertEqual(shortest_path(graph, "a", "a"), (0, ["a"]))

    def test_negative_weights_are_refused(self):
        with self.assertRaises(ValueError):
            Graph([("a", "b", -1)])
