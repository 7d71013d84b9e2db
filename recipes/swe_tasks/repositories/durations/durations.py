"""ISO 8601 durations of weeks, days, hours, minutes and seconds."""

import re

MINUTE = 60
HOUR = 60 * MINUTE
DAY = 24 * HOUR
DATE_UNITS = {
    "W": 7 * DAY,
    "D": DAY,
}
TIME_UNITS = {"H": HOUR, "M": MINUTE, "S": 1}
SHAPE = re.compile(r"P(?:\d+[WD])*(?:T(?:\d+[HMS])+)?")


def seconds(text):
    if not SHAPE.fullmatch(text) or text == "P":
        raise ValueError(f"no duration: {text!r}")
    date, _, time = text[1:].partition("T")
    total = 0
    for part, units in ((date, DATE_UNITS), (time, TIME_UNITS)):
        for number, unit in re.findall(r"(\d+)(\D)", part):
            total += int(number) * units[unit]
    return total


def describe(total):
    """The shortest text in whole units, largest first."""
    words = []
    for name, size in (("d", 86400), ("h", HOUR), ("min", MINUTE), ("s", 1)):
        count, total = divmod(total, size)
        if count:
            words.append(f"{count} {name}")
    return " ".join(words) or "0 s"
