import unittest

from pqueue import PriorityQueue


class TestQueue(unittest.TestCase):
    def test_smallest_first(self):
        queue = PriorityQueue()
        for priority, job in ((3, "c"), (1, "a"), (2, "b")):
            queue.push(priority, job)
        self.assertEqual(queue.peek(), "a")
        self.assertEqual(list(queue.drain()), ["a", "b", "c"])

    def test_empty(self):
        with self.assertRaises(IndexError):
            PriorityQueue().pop()
