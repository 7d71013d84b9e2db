"""Names the choice that a mistyped word probably means."""

import difflib
from collections.abc import Iterable


def did_you_mean(word: str, choices: Iterable[str], *, cutoff: float = 0.75) -> str:
    """Return "; did you mean X?", or "" where no choice is near (difflib's ratio of at least `cutoff`)."""
    near = difflib.get_close_matches(word, list(choices), n=1, cutoff=cutoff)
    return f"; did you mean {near[0]}?" if near else ""


def nearest_key(key: str, known: Iterable[str]) -> str:
    """As `did_you_mean`, for a dotted key: the parts that exist stay, the first that does not is compared there."""
    known = list(known)
    parts = key.split(".")
    for depth in range(len(parts)):
        before = parts[:depth]
        here = {path[depth] for path in (name.split(".") for name in known) if path[:depth] == before and path[depth:]}
        if parts[depth] not in here:
            near = difflib.get_close_matches(parts[depth], here, n=1, cutoff=0.7)
            if near:
                return f"; did you mean {'.'.join([*before, near[0], *parts[depth + 1 :]])}?"
            return did_you_mean(key, known, cutoff=0.85)
    return ""
