"""Which implementation `impl="auto"` tries first: a rule from one measured run, not from a model of the kernels."""

FASTEST_FIRST = ("fa4", "triton", "flex")
"""On Hopper, as measured there."""
FASTEST_FIRST_FOR_TINY_SEGMENTS = ("triton", "fa4", "flex")
"""On Hopper, where most visited blocks are seen in part only."""
BEST_KNOWN_FIRST = ("flex", "triton")
"""On other CUDA devices, for which our kernels have not been tuned."""
PARTIAL_SHARE = 0.5
"""Share of partly visible among visited blocks of 128 x 128 from which Triton's tiles of 64 beat flash-attn-4's of 128.

One run on one H200, bf16, 32 query and 8 key heads of size 128, 32,768 tokens, forward plus backward (commit f333bca,
docs/benchmarks/attention.csv): at a share of 0.45 (binary) 8.62 ms by fa4 and 8.99 ms by triton, at 0.54 (tiny
segments) 6.12 and 5.74 ms; at 0.16 and less (all others) fa4 is 18 to 32 % faster. A line through the two ratios
crosses at 0.48."""
MEASURED_HEAD_SIZE = 128
"""The rule is used at this head size only: others have other tiles, and nothing is known of them."""


def order_on_hopper(*, head_size: int, partial_share: float | None) -> tuple[str, ...]:
    """Implementations, the one expected to be fastest first.

    Args:
        head_size: D.
        partial_share: partly visible among visited blocks of 128 x 128 tokens, from 0 to 1; None if nobody counted.
    """
    if head_size == MEASURED_HEAD_SIZE and partial_share is not None and partial_share >= PARTIAL_SHARE:
        return FASTEST_FIRST_FOR_TINY_SEGMENTS
    return FASTEST_FIRST
