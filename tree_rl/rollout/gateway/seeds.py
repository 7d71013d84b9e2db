"""Random numbers that belong to a call, not to the order in which calls arrive: what makes rollouts repeatable."""

from collections.abc import Sequence
from hashlib import blake2b


def derived_seed(*parts: int | str | Sequence[int]) -> int:
    """A seed in [0, 2**62) that is the same in every process for the same parts, and otherwise unrelated.

    Args:
        parts: what the random numbers may depend on.
    """
    text = repr([list(part) if isinstance(part, Sequence) and not isinstance(part, str) else part for part in parts])
    return int.from_bytes(blake2b(text.encode(), digest_size=8).digest()) >> 2
