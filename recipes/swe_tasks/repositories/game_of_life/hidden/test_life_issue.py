import unittest

from life import read, step


class TestLifeIssue(unittest.TestCase):
    def test_block_and_blinker(self):
        block = read("##\n##")
        self.assertEqual(step(block), block)
        self.assertEqual(step({(0, 1), (1, 1), (2, 1)}), {(1, 0), (1, 1), (1, 2)})

    def test_glider(self):
        glider = read(".#.\n..#\n###")
        moved = glider
        for _ in range(4):
            moved = step(moved)
        self.assertEqual(moved, {(x + 1, y + 1) for x, y in glider})
