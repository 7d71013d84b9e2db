"""Semantic versions: MAJOR.MINOR.PATCH with an optional -prerelease."""

import re

SHAPE = re.compile(r"\d+\.\d+\.\d+(?:-[0-9A-Za-z.]+)?")


def parts(text):
    """Numbers come before words and are compared as numbers."""
    return tuple((0, int(part), "") if part.isdigit() else (1, 0, part) for part in text.split("."))


def sort_key(version):
    if not SHAPE.fullmatch(version):
        raise ValueError(f"no version: {version!r}")
    release, dash, prerelease = version.partition("-")
    # A release is newer than its candidates.
    return parts(release), not dash, parts(prerelease)


def newest(versions, allow_prerelease=True):
    candidates = [version for version in versions if allow_prerelease or "-" not in version]
    return max(candidates, key=sort_key, default=None)


def is_compatible(installed, wanted):
    """Same major version and at least as new."""
    same_major = parts(installed)[0] == parts(wanted)[0]
    return same_major and sort_key(installed) >= sort_key(wanted)
