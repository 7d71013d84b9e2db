"""Fills {{ name }} and {{ name|filter }} in a text."""

import html
import re

PLACEHOLDER = re.compile(r"\{\{\s*([\w.]+)(?:\|(\w+))?\s*\}\}")
FILTERS = {"upper": str.upper, "lower": str.lower, "escape": html.escape, "strip": str.strip}


class MissingName(KeyError):  # noqa: N818
    pass


def look_up(name, values):
    """Follow dots: `user.name` is values["user"]["name"]."""
    for part in name.split("."):
        if not isinstance(values, dict) or part not in values:
            raise MissingName(name)
        values = values[part]
    return values


def render(text, values):
    def fill(match):
        result = str(look_up(match[1], values))
        if match[2]:
            if match[2] not in FILTERS:
                raise ValueError(f"unknown filter {match[2]!r}")
            result = FILTERS[match[2]](result)
        return result

    return PLACEHOLDER.sub(fill, text)
