import unittest

from durations import describe, seconds


class TestDurations(unittest.TestCase):
    def test_time(self):
        self.assertEqual(seconds("PT1H30M"), 5400)
        self.assertEqual(seconds("PT5S"), 5)

    def test_weeks(self):
        self.assertEqual(seconds("P1W"), 604800)

    def test_no_duration(self):
        for text in ("P", "1H", "PT", "P1X"):
            with self.assertRaises(ValueError):
                seconds(text)

    def test_describe(self):
        self.assertEqual(describe(90061), "1 d 1 h 1 min 1 s")
