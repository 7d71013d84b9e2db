import unittest

from roman import from_roman, to_roman


class TestRomanIssue(unittest.TestCase):
    def test_fours_and_nines(self):
        self.assertEqual([to_roman(n) for n in (4, 9, 14, 1999)], ["IV", "IX", "XIV", "MCMXCIX"])

    def test_round_trip_is_short(self):
        for number in range(1, 4000):
            self.assertEqual(from_roman(to_roman(number)), number)
            self.assertNotIn("IIII", to_roman(number))
