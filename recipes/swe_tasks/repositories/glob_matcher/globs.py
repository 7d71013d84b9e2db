"""File patterns: ? is one character, * any number within a directory, ** any number of directories."""

import re


def translate(pattern):
    parts = []
    index = 0
    while index < len(pattern):
        if pattern.startswith("**/", index):
            parts.append("(?:.*/)?")
            index += 3
        elif pattern.startswith("**", index):
            parts.append(".*")
            index += 2
        elif pattern[index] == "*":
            parts.append("[^/]*")
            index += 1
        elif pattern[index] == "?":
            parts.append("[^/]")
            index += 1
        else:
            parts.append(re.escape(pattern[index]))
            index += 1
    return "".join(parts)


def matches(pattern, path):
    return re.fullmatch(translate(pattern), path) is not None


def select(paths, include, exclude=()):
    """Paths that match some pattern of `include` and none of `exclude`, in order."""
    wanted = [path for path in paths if any(matches(pattern, path) for pattern in include)]
    return [path for path in wanted if not any(matches(pattern, path) for pattern in exclude)]
