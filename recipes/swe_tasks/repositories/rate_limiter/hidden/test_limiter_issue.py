import unittest

from limiter import TokenBucket


class TestLimiterIssue(unittest.TestCase):
    def test_capacity_holds_after_a_pause(self):
        bucket = TokenBucket(5, 10)
        self.assertEqual(sum(bucket.allow(3600) for _ in range(100)), 5)

    def test_capacity_holds_from_the_start(self):
        bucket = TokenBucket(1, 1)
        self.assertEqual(bucket.wait_seconds(100), 0)
        self.assertTrue(bucket.allow(100))
        self.assertFalse(bucket.allow(100))
