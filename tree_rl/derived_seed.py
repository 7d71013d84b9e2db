"""Seeds that depend on a call and not on the order of calls, so that rollouts are repeatable."""

from collections.abc import Sequence
from hashlib import blake2b


def derived_seed(*parts: int | str | Sequence[int]) -> int:
    """A seed in [0, 2**62). Equal parts give equal seeds in every process, different parts unrelated seeds."""
    text = repr([list(part) if isinstance(part, Sequence) and not isinstance(part, str) else part for part in parts])
    return int.from_bytes(blake2b(text.encode(), digest_size=8).digest()) >> 2
