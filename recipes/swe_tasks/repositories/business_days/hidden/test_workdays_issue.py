import unittest
from datetime import date

from workdays import add_business_days, business_days_between, is_business_day


class TestWorkdaysIssue(unittest.TestCase):
    def test_friday_to_monday(self):
        self.assertEqual(add_business_days(date(2026, 11, 20), 1), date(2026, 11, 23))
        self.assertEqual(add_business_days(date(2026, 11, 23), -1), date(2026, 11, 20))

    def test_saturday(self):
        self.assertFalse(is_business_day(date(2026, 11, 21)))
        self.assertEqual(business_days_between(date(2026, 11, 16), date(2026, 11, 30)), 10)
