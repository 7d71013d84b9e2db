"""Dates on which people work."""

from datetime import timedelta


def is_business_day(day, holidays=frozenset()):
    return day.weekday() < 5 and day not in holidays


def add_business_days(start, count, holidays=frozenset()):
    """The business day `count` business days after `start`, or before it where the count is negative."""
    step = timedelta(days=1 if count >= 0 else -1)
    day = start
    for _ in range(abs(count)):
        day += step
        while not is_business_day(day, holidays):
            day += step
    return day


def business_days_between(start, end, holidays=frozenset()):
    """Business days from `start` up to but not including `end`."""
    days = (end - start).days
    return sum(is_business_day(start + timedelta(days=offset), holidays) for offset in range(days))
