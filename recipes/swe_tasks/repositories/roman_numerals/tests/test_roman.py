import unittest

from roman import from_roman, to_roman


class TestRoman(unittest.TestCase):
    def test_plain_numbers(self):
        self.assertEqual(to_roman(7), "VII")
        self.assertEqual(to_roman(2026 - 6), "MMXX")

    def test_reading(self):
        self.assertEqual(from_roman("MCMXC"), 1990)

    def test_out_of_range(self):
        for number in (0, 4000, -3):
            with self.assertRaises(ValueError):
                to_roman(number)
