"""Which shapes, sizes and head layouts a run covers."""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import product

from shapes import HEAD_LAYOUTS, SHAPES, TINY_HEADS

TOKENS = (8_192, 16_384, 32_768, 65_536, 131_072)
"""Sizes of the registry."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Case:
    """One tree and one head layout."""

    shape: str
    """Key of `SHAPES`."""
    heads: str
    """Key of `HEAD_LAYOUTS`."""
    tokens: int
    """Unique tokens, about."""


def quick_plan(
    *, shapes: Sequence[str] | None, heads: Sequence[str] | None, tokens: Sequence[int] | None
) -> list[Case]:
    """Every shape once, at 32k tokens; what is given narrows or replaces the default."""
    return _cases(shapes or SHAPES, heads or ("qwen3-8b",), tokens or (32_768,))


def full_plan(*, shapes: Sequence[str] | None, heads: Sequence[str] | None, tokens: Sequence[int] | None) -> list[Case]:
    """8B heads from 8k to 128k tokens, the other layouts on three telling shapes; as `quick_plan` where given."""
    if shapes or heads or tokens:
        return _cases(shapes or SHAPES, heads or ("qwen3-8b",), tokens or (8_192, 32_768, 65_536))
    telling = ("grpo", "stubs", "tiny")
    others = ("qwen3-0.6b", "qwen3-32b", "qwen3-30b-a3b", "llama-3.2-1b")
    return [
        *_cases(SHAPES, ("qwen3-8b",), (8_192, 32_768, 65_536)),
        *_cases(("grpo", "stubs", "chains"), ("qwen3-8b",), (131_072,)),
        *_cases(telling, others, (32_768,)),
    ]


def registry(*, shapes: Sequence[str] | None, heads: Sequence[str] | None, tokens: Sequence[int] | None) -> list[Case]:
    """Every shape at every size in every head layout of a published model; narrowed or replaced by what is given."""
    published = [name for name in HEAD_LAYOUTS if name != TINY_HEADS]
    return _cases(shapes or list(SHAPES), heads or published, tokens or TOKENS)


def _cases(shapes: Sequence[str], heads: Sequence[str], tokens: Sequence[int]) -> list[Case]:
    return [Case(shape=s, heads=h, tokens=t) for h, t, s in product(heads, tokens, shapes)]
