import unittest

from life import draw, neighbours, read, step


class TestLife(unittest.TestCase):
    def test_pictures(self):
        self.assertEqual(draw(read("#.\n.#"), 2, 2), "#.\n.#")

    def test_loneliness(self):
        self.assertEqual(step({(0, 0), (5, 5)}), set())
        self.assertEqual(step(set()), set())

    def test_neighbours(self):
        self.assertEqual(len(neighbours((3, 3))), 8)
        self.assertNotIn((3, 3), neighbours((3, 3)))
