import unittest

from pqueue import PriorityQueue


class TestQueueIssue(unittest.TestCase):
    def test_jobs_that_cannot_be_compared(self):
        queue = PriorityQueue()
        queue.push(1, {"name": "first"})
        queue.push(1, {"name": "second"})
        self.assertEqual(queue.peek(), {"name": "first"})
        self.assertEqual([job["name"] for job in queue.drain()], ["first", "second"])

    def test_equal_priorities_keep_their_order(self):
        queue = PriorityQueue()
        for job in ("z", "m", "a"):
            queue.push(0, job)
        self.assertEqual(list(queue.drain()), ["z", "m", "a"])
