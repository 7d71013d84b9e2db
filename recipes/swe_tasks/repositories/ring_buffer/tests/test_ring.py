import unittest

from ring import RingBuffer


class TestRing(unittest.TestCase):
    def test_before_it_is_full(self):
        buffer = RingBuffer(3)
        buffer.push(1)
        buffer.push(2)
        self.assertEqual(buffer.items(), [1, 2])

    def test_mean_of_the_newest(self):
        buffer = RingBuffer(2)
        for value in (10, 1, 3):
            buffer.push(value)
        self.assertEqual(buffer.mean(), 2)
        self.assertEqual(len(buffer), 2)

    def test_empty(self):
        with self.assertRaises(ValueError):
            RingBuffer(2).mean()
