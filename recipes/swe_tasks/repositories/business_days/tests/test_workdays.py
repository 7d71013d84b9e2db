import unittest
from datetime import date

from workdays import add_business_days, business_days_between, is_business_day


class TestWorkdays(unittest.TestCase):
    def test_within_a_week(self):
        self.assertEqual(add_business_days(date(2026, 11, 16), 3), date(2026, 11, 19))
        self.assertEqual(add_business_days(date(2026, 11, 19), -3), date(2026, 11, 16))

    def test_sunday(self):
        self.assertFalse(is_business_day(date(2026, 11, 22)))

    def test_holiday(self):
        holidays = {date(2026, 11, 17)}
        self.assertEqual(add_business_days(date(2026, 11, 16), 1, holidays), date(2026, 11, 18))
        self.assertEqual(business_days_between(date(2026, 11, 16), date(2026, 11, 20), holidays), 3)
