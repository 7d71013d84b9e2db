"""Suggests the choice that a mistyped word probably means."""

import difflib
from collections.abc import Iterable


def did_you_mean(word: str, choices: Iterable[str], *, cutoff: float = 0.75) -> str:
    """Return "; did you mean X?", or "" if no choice is similar (difflib's ratio of at least `cutoff`)."""
    near = difflib.get_close_matches(word, list(choices), n=1, cutoff=cutoff)
    return f"; did you mean {near[0]}?" if near else ""


def nearest_key(key: str, known: Iterable[str]) -> str:
    """As `did_you_mean`, for a dotted key. Suggests only existing keys.

    Replaces each unknown part by the most similar known one. If that gives no key, suggests the most similar key with
    the same last part in the same section.
    """
    known = set(known)
    parts = key.split(".")
    found = _corrected(parts, (), known)
    if found is None:
        leaves = difflib.get_close_matches(parts[-1], {name.rpartition(".")[2] for name in known}, n=1, cutoff=0.8)
        section = [name for name in known if name.split(".")[0] == parts[0] and name.rpartition(".")[2] in leaves]
        near = difflib.get_close_matches(key, sorted(section), n=1, cutoff=0.6)
        found = near[0] if near and len(parts) > 1 else None
    return f"; did you mean {found}?" if found else did_you_mean(key, known, cutoff=0.85)


def _corrected(parts: list[str], before: tuple[str, ...], known: set[str]) -> str | None:
    """The first existing key whose parts are the given parts or, if unknown, the most similar ones at their place."""
    depth = len(before)
    if depth == len(parts):
        return ".".join(before)
    here = {path[depth] for path in (name.split(".") for name in known) if (*path[:depth],) == before and path[depth:]}
    near = [parts[depth]] if parts[depth] in here else difflib.get_close_matches(parts[depth], here, n=3, cutoff=0.7)
    tried = (_corrected(parts, (*before, part), known) for part in near)
    return next((found for found in tried if found is not None), None)
