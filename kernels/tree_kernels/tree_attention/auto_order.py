"""Which implementation `impl="auto"` tries first: a rule from what was measured, not from a model of the kernels."""

FASTEST_FIRST = ("fa4", "triton", "flex")
"""On Hopper, as measured there."""
FASTEST_FIRST_FOR_TINY_SEGMENTS = ("triton", "fa4", "flex")
"""On Hopper, where most visited blocks are seen in part only."""
BEST_KNOWN_FIRST = ("flex", "triton")
"""On other CUDA devices, for which our kernels have not been tuned."""
PARTIAL_SHARE = 0.5
"""Share of partly visible among visited blocks of 128 x 128 from which Triton's tiles of 64 beat flash-attn-4's of 128.

One H200, bf16, 32 query and 8 key heads of size 128, forward plus backward (commit 4fb1dfa, in
docs/benchmarks/attention.csv): at 32,768 tokens and a share of 0.45 (binary) both are equal, at 0.54 (tiny segments)
triton is 8 % faster, at 65,536 and 0.53 7 %; at 0.26 and less (all others) fa4 is faster by 9 % and more."""
SHARE_OF_SMALL = 0.8
"""The same below `SMALL` tokens, where triton's more numerous launches count: at 8,192 tokens and a share of 0.66 (tiny
segments) fa4 is 17 % faster, at 0.88 (binary) triton 21 %."""
SMALL = 16_384
"""Between the 8,192 and the 32,768 tokens that were measured."""
MEASURED_HEAD_SIZE = 128
"""The rule is used at this head size only: others have other tiles, and it was not made for them."""


def order_on_hopper(*, head_size: int, partial_share: float | None, num_tokens: int | None = None) -> tuple[str, ...]:
    """Implementations, the one expected to be fastest first.

    Args:
        head_size: D.
        partial_share: partly visible among visited blocks of 128 x 128 tokens, from 0 to 1; None if nobody counted.
        num_tokens: N of the forest; None stands for many.
    """
    if head_size != MEASURED_HEAD_SIZE or partial_share is None:
        return FASTEST_FIRST
    is_small = num_tokens is not None and num_tokens < SMALL
    is_tiny = partial_share >= (SHARE_OF_SMALL if is_small else PARTIAL_SHARE)
    return FASTEST_FIRST_FOR_TINY_SEGMENTS if is_tiny else FASTEST_FIRST
