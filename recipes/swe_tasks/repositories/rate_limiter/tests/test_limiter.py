import unittest

from limiter import TokenBucket


class TestLimiter(unittest.TestCase):
    def test_burst_then_refusal(self):
        bucket = TokenBucket(2, 1)
        self.assertEqual([bucket.allow(0) for _ in range(3)], [True, True, False])
        self.assertTrue(bucket.allow(1))

    def test_waiting_time(self):
        bucket = TokenBucket(1, 0.5)
        bucket.allow(0)
        self.assertEqual(bucket.wait_seconds(0), 2)

    def test_time_runs_forward(self):
        bucket = TokenBucket(1, 1, now=5)
        with self.assertRaises(ValueError):
            bucket.allow(4)
