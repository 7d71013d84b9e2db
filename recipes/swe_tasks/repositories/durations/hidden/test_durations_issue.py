import unittest

from durations import describe, seconds


class TestDurationsIssue(unittest.TestCase):
    def test_days(self):
        self.assertEqual(seconds("P2D"), 172800)

    def test_everything(self):
        self.assertEqual(seconds("P1W1DT1H1M1S"), 604800 + 86400 + 3600 + 61)
        self.assertEqual(describe(seconds("P1DT2H")), "1 d 2 h")
