import unittest

from ring import RingBuffer


class TestRingIssue(unittest.TestCase):
    def test_oldest_first_after_wrapping(self):
        buffer = RingBuffer(3)
        for value in (1, 2, 3, 4):
            buffer.push(value)
        self.assertEqual(buffer.items(), [2, 3, 4])

    def test_many_rounds(self):
        for size in range(1, 6):
            buffer = RingBuffer(size)
            for value in range(23):
                buffer.push(value)
            self.assertEqual(buffer.items(), list(range(23 - size, 23)))
